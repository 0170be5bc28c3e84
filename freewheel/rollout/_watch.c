/* A thread without Python that ends the process when Python cannot: while C code of an environment holds the interpreter lock, no
   Python thread runs, no time-out is noticed and no signal is handled. run/stopping/watchdog.py describes the cells and does all the rest. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* As in rollout/call_state.py; times in ms. */
enum { SINCE, PHASE, LANE, STEP, BEAT, SIGNAL, SIGNALS, ENDING, CODE, LIMITS, SEEDS = LIMITS + 4 };
enum { CONSTRUCT, RESET, CALL };

static const int64_t TICK = 100, LONGEST_TICK = 200; /* more than that has passed only if the process was stopped */
static const int64_t SILENT = 1000;                  /* of the Python thread: it cannot run */
static const int64_t FIRST = 4200, SECOND = 300;     /* after a signal */

static struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t over;
    int running, ended, socket;
    pid_t pid;
    Py_buffer cells;
    char *summary, *partial, *rest, *name; /* paths; the summary after its first entries; the environment, as in JSON */
    ino_t earlier;                         /* the summary of an earlier session, if there is one */
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int64_t now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Signals that wait to be read by the Python thread; `first` is the first of them. */
static int waiting(int *first)
{
    unsigned char bytes[64];
    const ssize_t count = recv(watch.socket, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
    int found = 0;
    for (ssize_t i = 0; i < count; i++)
        if (bytes[i] == SIGINT || bytes[i] == SIGTERM || bytes[i] == SIGHUP) {
            if (!found++)
                *first = bytes[i];
        }
    return found;
}

static void put(int file, const char *text)
{
    size_t left = strlen(text);
    while (left) {
        const ssize_t done = write(file, text, left);
        if (done < 0 && errno != EINTR)
            return;
        if (done > 0)
            text += done, left -= (size_t)done;
    }
}

static const char *signal_name(int number)
{
    return number == SIGINT ? "SIGINT" : number == SIGTERM ? "SIGTERM" : "SIGHUP";
}

/* Where the environment is, for the message. */
static void place(char *text, size_t size, const volatile int64_t *cells, Py_ssize_t lanes)
{
    const int64_t lane = cells[LANE], step = cells[STEP];
    char who[64] = "", at[128] = "a call";
    if (lane >= 0)
        snprintf(who, sizeof who, "lane %lld of ", (long long)lane);
    const long long seed = lane >= 0 && lane < lanes ? (long long)cells[SEEDS + lane] : 0;
    if (cells[PHASE] == CONSTRUCT)
        snprintf(at, sizeof at, "its constructor");
    else if (lane >= 0 && cells[PHASE] == RESET)
        snprintf(at, sizeof at, "reset() with seed %lld", seed);
    else if (lane >= 0)
        snprintf(at, sizeof at, "step %lld of the episode with seed %lld", (long long)step, seed);
    snprintf(text, size, "%s%s did not return from %s", who, watch.name ? watch.name : "the environment", at);
}

/* Of a file; 0: there is none. Every summary is written to a new file. */
static ino_t inode(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 ? about.st_ino : 0;
}

static void end_process(int64_t code, const char *ended, const char *message)
{
    put(STDERR_FILENO, "freewheel: ");
    put(STDERR_FILENO, message);
    put(STDERR_FILENO, "\n");
    pthread_mutex_lock(&watch.lock);
    if (watch.summary != NULL && inode(watch.summary) == watch.earlier) {
        unlink(watch.partial);
        const int file = open(watch.partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (file >= 0) {
            char head[64];
            snprintf(head, sizeof head, "{\"exit_code\": %lld, \"ended\": \"", (long long)code);
            put(file, head);
            put(file, ended);
            put(file, "\", \"error\": \"");
            put(file, message);
            put(file, "\", ");
            put(file, watch.rest);
            fsync(file);
            close(file);
            rename(watch.partial, watch.summary);
        }
    }
    _exit((int)code);
}

/* How long something has gone on, by ticks. */
static int64_t since(int64_t *age, int goes_on, int64_t tick)
{
    return *age = goes_on ? *age + tick : 0;
}

static void look(int64_t tick)
{
    static int64_t beat, call, lane, step, silent, stuck, first, second, ending;
    const volatile int64_t *cells = watch.cells.buf;
    const Py_ssize_t lanes = watch.cells.len / (Py_ssize_t)sizeof(int64_t) - SEEDS;
    if (tick < 0) { /* a new run */
        silent = stuck = first = second = ending = 0;
        return;
    }
    int number = (int)cells[SIGNAL], pending = 0;
    const int64_t signals = cells[SIGNALS] + waiting(cells[SIGNALS] ? &pending : &number);
    since(&silent, cells[BEAT] == beat, tick);
    since(&stuck, cells[SINCE] && cells[SINCE] == call && cells[LANE] == lane && cells[STEP] == step, tick);
    since(&first, signals > 0, tick);
    since(&second, signals > 1, tick);
    since(&ending, cells[ENDING] > 0, tick);
    beat = cells[BEAT], call = cells[SINCE], lane = cells[LANE], step = cells[STEP];

    char message[512] = "it did not end in time", where[384], ended[64] = "failed";
    if (cells[SINCE] && stuck > TICK)
        place(where, sizeof where, cells, lanes);
    else
        snprintf(where, sizeof where, "it did not end in time");
    const int64_t limit = cells[LIMITS + (cells[PHASE] & 3)];
    if (signals) {
        snprintf(ended, sizeof ended, "interrupted (%s)", signal_name(number));
        snprintf(message, sizeof message, "%s after %s", where, signal_name(number));
    } else
        snprintf(message, sizeof message, "%s within %g s (its code holds Python's interpreter lock)", where, (double)limit / 1000);
    if (cells[ENDING] > 0 && ending > cells[ENDING])
        end_process(cells[CODE], ended, message);
    if (silent > SILENT && cells[SINCE] && limit > 0 && stuck > limit && !signals)
        end_process(1, ended, message);
    if ((silent > SILENT && first > FIRST) || (silent > SECOND && second > SECOND))
        end_process(128 + number, ended, message);
}

static void *watching(void *nothing)
{
    (void)nothing;
    int64_t last = now_ms();
    look(-1);
    pthread_mutex_lock(&watch.lock);
    while (!watch.ended) {
        const int64_t until = now_ms() + TICK;
        const struct timespec time = {until / 1000, (until % 1000) * 1000000};
        pthread_cond_timedwait(&watch.over, &watch.lock, &time);
        if (watch.ended)
            break;
        pthread_mutex_unlock(&watch.lock);
        const int64_t now = now_ms(), tick = now - last;
        last = now;
        look(tick > LONGEST_TICK ? LONGEST_TICK : tick);
        pthread_mutex_lock(&watch.lock);
    }
    pthread_mutex_unlock(&watch.lock);
    return NULL;
}

static void set_text(char **kept, const char *text)
{
    free(*kept);
    *kept = text == NULL ? NULL : strdup(text);
}

const char watch_doc[] = "watch(cells, socket, name)\n\nBegin to watch these int64 cells, and signals that come to a socket.";

PyObject *watch_begin(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *cells;
    const char *name;
    int socket;
    if (!PyArg_ParseTuple(args, "Ois", &cells, &socket, &name))
        return NULL;
    if (watch.running && watch.pid == getpid())
        return PyErr_SetString(PyExc_RuntimeError, "another run is watched"), NULL;
    if (PyObject_GetBuffer(cells, &watch.cells, PyBUF_WRITABLE) < 0)
        return NULL;
    watch.socket = socket, watch.ended = 0, watch.pid = getpid();
    pthread_mutex_init(&watch.lock, NULL); /* the child of a process that was watched may have a copy that is locked */
    set_text(&watch.name, name);
    set_text(&watch.summary, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&watch.over, &monotonic);
    pthread_condattr_destroy(&monotonic);
    sigset_t all, before; /* signals are for the threads of Python */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const int failed = pthread_create(&watch.thread, NULL, watching, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        PyBuffer_Release(&watch.cells);
        return PyErr_SetString(PyExc_OSError, "no thread can be started"), NULL;
    }
    watch.running = 1;
    Py_RETURN_NONE;
}

const char prepare_doc[] = "prepare(summary, partial, rest)\n\nWhere to write a summary, by way of a file `partial`, and all of it but its first entries.";

PyObject *watch_prepare(PyObject *module, PyObject *args)
{
    (void)module;
    const char *summary, *partial, *rest;
    if (!PyArg_ParseTuple(args, "sss", &summary, &partial, &rest))
        return NULL;
    pthread_mutex_lock(&watch.lock);
    if (watch.summary == NULL)
        watch.earlier = inode(summary);
    set_text(&watch.summary, summary);
    set_text(&watch.partial, partial);
    set_text(&watch.rest, rest);
    pthread_mutex_unlock(&watch.lock);
    Py_RETURN_NONE;
}

const char unwatch_doc[] = "unwatch()\n\nEnd the thread.";

PyObject *watch_end(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    if (!watch.running || watch.pid != getpid())
        Py_RETURN_NONE;
    pthread_mutex_lock(&watch.lock);
    watch.ended = 1;
    pthread_cond_signal(&watch.over);
    pthread_mutex_unlock(&watch.lock);
    pthread_join(watch.thread, NULL);
    pthread_cond_destroy(&watch.over);
    PyBuffer_Release(&watch.cells);
    watch.running = 0;
    Py_RETURN_NONE;
}
