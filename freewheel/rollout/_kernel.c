/* What a worker with one slow env does at every step, without numpy; kernel.py lists the same functions in Python.

   A process that has slept has cold caches, so the amount of code and memory that it touches matters more than the amount of
   computation. A layer is a matrix [in + 1, out], row by row, its last row the bias. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif

enum { LAYERS = 16 };
static const float MASKED = -1e9f; /* logit of an action that is not allowed */

typedef float (*Activation)(float);

typedef struct {
    PyObject_HEAD
    Py_buffer vector;         /* all weights */
    Py_ssize_t start;         /* where the first layer begins */
    int layers;
    Py_ssize_t widths[LAYERS + 1], widest;
    Activation activation;
    float *values;            /* room for the widest layer, four times */
    float *logits, *chances;  /* of each choice; chances are in proportion */
} Single;

static float elu(float x) { return x > 0 ? x : expm1f(x); }
static float silu(float x) { return x / (1 + expf(x > -80 ? -x : 80)); }
static float relu(float x) { return x > 0 ? x : 0; }

static const struct {
    const char *name;
    Activation function;
} ACTIVATIONS[] = {{"tanh", tanhf}, {"relu", relu}, {"elu", elu}, {"silu", silu}};

VECTORISED
static void layer(const float *restrict in, const float *restrict weights, float *restrict out, Py_ssize_t ins, Py_ssize_t outs)
{
    memcpy(out, weights + ins * outs, (size_t)outs * sizeof(float));
    for (Py_ssize_t i = 0; i < ins; i++) {
        const float value = in[i], *restrict row = weights + i * outs;
        for (Py_ssize_t j = 0; j < outs; j++)
            out[j] += value * row[j];
    }
}

static void network(Single *self, const float *inputs)
{
    const float *weights = (const float *)self->vector.buf + self->start, *in = inputs;
    for (int l = 0; l < self->layers; l++) {
        const Py_ssize_t ins = self->widths[l], outs = self->widths[l + 1];
        const int last = l == self->layers - 1;
        float *out = last ? self->logits : self->values + (l % 2) * self->widest;
        layer(in, weights, out, ins, outs);
        if (!last)
            for (Py_ssize_t j = 0; j < outs; j++)
                out[j] = self->activation(out[j]);
        weights += (ins + 1) * outs;
        in = out;
    }
}

static Py_ssize_t likeliest_of(const float *logits, Py_ssize_t count)
{
    Py_ssize_t best = 0;
    for (Py_ssize_t j = 1; j < count; j++)
        if (logits[j] > logits[best])
            best = j;
    return best;
}

/* A contiguous buffer of so many floats, or an error. */
static int floats(PyObject *source, Py_ssize_t count, Py_buffer *view)
{
    if (PyObject_GetBuffer(source, view, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (view->len != count * (Py_ssize_t)sizeof(float) || view->itemsize != sizeof(float)) {
        PyErr_Format(PyExc_ValueError, "expected %zd float32 numbers, got %zd bytes", count, view->len);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(choose_doc, "choose(inputs, mask, draw)\n\n(action, log-probability): where draw from [0, 1) falls, or the "
                         "likeliest for None; mask: None, or > 0 where an action is allowed.");

static PyObject *choose(Single *self, PyObject *const *args, Py_ssize_t count)
{
    const Py_ssize_t choices = self->widths[self->layers];
    Py_buffer view;
    double draw = -1, total = 0;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "choose takes inputs, mask and draw");
        return NULL;
    }
    if (args[2] != Py_None && (draw = PyFloat_AsDouble(args[2])) < 0 && PyErr_Occurred())
        return NULL;
    if (floats(args[0], self->widths[0], &view) < 0)
        return NULL;
    network(self, view.buf);
    PyBuffer_Release(&view);
    float *logits = self->logits;
    if (args[1] != Py_None) {
        if (floats(args[1], choices, &view) < 0)
            return NULL;
        for (Py_ssize_t j = 0; j < choices; j++)
            if (!(((const float *)view.buf)[j] > 0))
                logits[j] = MASKED;
        PyBuffer_Release(&view);
    }
    const Py_ssize_t likeliest = likeliest_of(logits, choices);
    const float highest = logits[likeliest];
    for (Py_ssize_t j = 0; j < choices; j++)
        total += self->chances[j] = expf(logits[j] - highest);
    Py_ssize_t action = likeliest;
    if (draw >= 0) {
        double left = draw * total;
        for (Py_ssize_t j = 0; j < choices; j++)
            if ((left -= self->chances[j]) < 0) {
                action = j;
                break;
            }
    }
    return Py_BuildValue("nd", action, (double)logits[action] - highest - log(total));
}

static int single_init(Single *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"vector", "start", "widths", "activation", NULL};
    PyObject *vector, *widths;
    const char *activation;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnO!s", names, &vector, &self->start, &PyTuple_Type, &widths, &activation))
        return -1;
    for (size_t a = 0; a < sizeof ACTIVATIONS / sizeof *ACTIVATIONS; a++)
        if (strcmp(activation, ACTIVATIONS[a].name) == 0)
            self->activation = ACTIVATIONS[a].function;
    self->layers = (int)PyTuple_Size(widths) - 1;
    if (self->activation == NULL || self->layers < 1 || self->layers > LAYERS || self->start < 0) {
        PyErr_SetString(PyExc_ValueError, "unknown activation, or not 1 to 16 layers");
        return -1;
    }
    Py_ssize_t widest = 0, needed = self->start;
    for (int l = 0; l <= self->layers; l++) {
        const Py_ssize_t width = self->widths[l] = PyLong_AsSsize_t(PyTuple_GetItem(widths, l));
        if (width < 1) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a layer without a width");
            return -1;
        }
        widest = width > widest ? width : widest;
        if (l > 0)
            needed += (self->widths[l - 1] + 1) * width;
    }
    if (PyObject_GetBuffer(vector, &self->vector, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (self->vector.itemsize != sizeof(float) || self->vector.len < needed * (Py_ssize_t)sizeof(float)) {
        PyErr_SetString(PyExc_ValueError, "the vector is shorter than these layers");
        return -1;
    }
    self->values = malloc((size_t)(4 * widest) * sizeof(float));
    if (self->values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->widest = widest;
    self->logits = self->values + 2 * widest;
    self->chances = self->values + 3 * widest;
    return 0;
}

static void single_dealloc(Single *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->vector.obj != NULL)
        PyBuffer_Release(&self->vector);
    free(self->values);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* ------------------------------------------------------------------------------------------------------------------- Page */

enum { OBS, ACTION, LOG_PROB, REWARD, TERMINATED, TRUNCATED, NEXT_OBS, VALID, COLUMNS, FIRST = COLUMNS, SUCCESSOR, BUFFERS };

typedef struct {
    PyObject_HEAD
    Py_buffer buffers[BUFFERS];
    Py_ssize_t rows, width, action_width; /* of all columns; bytes of an observation and of an action */
    int discrete;
} Page;

static int page_init(Page *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"columns", "first", "successor", NULL};
    PyObject *columns, *given[BUFFERS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO", names, &PyTuple_Type, &columns, &given[FIRST], &given[SUCCESSOR]))
        return -1;
    if (PyTuple_Size(columns) != COLUMNS) {
        PyErr_Format(PyExc_ValueError, "expected %d columns, got %zd", COLUMNS, PyTuple_Size(columns));
        return -1;
    }
    for (int b = 0; b < COLUMNS; b++)
        given[b] = PyTuple_GetItem(columns, b);
    for (int b = 0; b < BUFFERS; b++)
        if (PyObject_GetBuffer(given[b], &self->buffers[b], PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) < 0)
            return -1;
    const Py_buffer *buffers = self->buffers;
    self->rows = buffers[VALID].len;
    self->width = buffers[SUCCESSOR].len;
    self->action_width = self->rows ? buffers[ACTION].len / self->rows : 0;
    self->discrete = buffers[ACTION].itemsize == sizeof(int64_t);
    const Py_ssize_t expected[BUFFERS] = {self->rows * self->width, self->rows * self->action_width,
                                          self->rows * 4, self->rows * 4, self->rows, self->rows,
                                          self->rows * self->width, self->rows, self->width, self->width};
    for (int b = 0; b < BUFFERS; b++)
        if (buffers[b].len != expected[b]) {
            PyErr_Format(PyExc_ValueError, "buffer %d has %zd bytes, not %zd", b, buffers[b].len, expected[b]);
            return -1;
        }
    return 0;
}

static void page_dealloc(Page *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (int b = 0; b < BUFFERS; b++)
        if (self->buffers[b].obj != NULL)
            PyBuffer_Release(&self->buffers[b]);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* The row that args[0] names, or -1 and an error. */
static Py_ssize_t row_of(const Page *self, PyObject *const *args, Py_ssize_t count, Py_ssize_t expected)
{
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
        return -1;
    }
    const Py_ssize_t t = PyLong_AsSsize_t(args[0]);
    if (t == -1 && PyErr_Occurred())
        return -1;
    if (t < 0 || t >= self->rows) {
        PyErr_Format(PyExc_IndexError, "row %zd of %zd", t, self->rows);
        return -1;
    }
    return t;
}

PyDoc_STRVAR(see_doc, "see(t, fresh)\n\nWrite the observation of row t: the first of an episode, or the last step's successor.");

static PyObject *page_see(Page *self, PyObject *const *args, Py_ssize_t count)
{
    const Py_ssize_t t = row_of(self, args, count, 2);
    if (t < 0)
        return NULL;
    const Py_buffer *shown = &self->buffers[args[1] == Py_True ? FIRST : SUCCESSOR];
    memcpy((char *)self->buffers[OBS].buf + t * self->width, shown->buf, (size_t)self->width);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(put_doc, "put(t, action, log_prob, reward, terminated, truncated)\n\nWrite the rest of row t; the reward as it was "
                      "written, in float32.");

static PyObject *page_put(Page *self, PyObject *const *args, Py_ssize_t count)
{
    const Py_ssize_t t = row_of(self, args, count, 6);
    if (t < 0)
        return NULL;
    char *action = (char *)self->buffers[ACTION].buf + t * self->action_width;
    if (self->discrete) {
        const int64_t chosen = PyLong_AsLongLong(args[1]);
        memcpy(action, &chosen, sizeof chosen);
    } else {
        Py_buffer view;
        if (PyObject_GetBuffer(args[1], &view, PyBUF_C_CONTIGUOUS) < 0)
            return NULL;
        if (view.len != self->action_width)
            PyErr_Format(PyExc_ValueError, "an action of %zd bytes, not %zd", view.len, self->action_width);
        else
            memcpy(action, view.buf, (size_t)view.len);
        PyBuffer_Release(&view);
    }
    const float log_prob = (float)PyFloat_AsDouble(args[2]), reward = (float)PyFloat_AsDouble(args[3]);
    const int terminated = PyObject_IsTrue(args[4]), truncated = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred())
        return NULL;
    ((float *)self->buffers[LOG_PROB].buf)[t] = log_prob;
    ((float *)self->buffers[REWARD].buf)[t] = reward;
    ((char *)self->buffers[TERMINATED].buf)[t] = (char)terminated;
    ((char *)self->buffers[TRUNCATED].buf)[t] = (char)truncated;
    ((char *)self->buffers[VALID].buf)[t] = 1;
    memcpy((char *)self->buffers[NEXT_OBS].buf + t * self->width, self->buffers[SUCCESSOR].buf, (size_t)self->width);
    return PyFloat_FromDouble(reward);
}

static PyMethodDef page_methods[] = {{"see", (PyCFunction)(void (*)(void))page_see, METH_FASTCALL, see_doc},
                                     {"put", (PyCFunction)(void (*)(void))page_put, METH_FASTCALL, put_doc},
                                     {0}};
static PyType_Slot page_slots[] = {{Py_tp_init, page_init}, {Py_tp_dealloc, page_dealloc}, {Py_tp_methods, page_methods}, {0}};
static PyType_Spec page_spec = {"freewheel.rollout._kernel.RowWriter", sizeof(Page), 0, Py_TPFLAGS_DEFAULT, page_slots};

/* ----------------------------------------------------------------------------------------------------------------- module */

PyDoc_STRVAR(finite_doc, "finite(values)\n\nWhether no float32 of a contiguous buffer is infinite or not a number.");

static PyObject *all_finite(PyObject *module, PyObject *values)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(values, &view, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    const uint32_t exponent = 0x7f800000, *bits = view.buf;
    int all = 1;
    for (Py_ssize_t i = 0; i < view.len / (Py_ssize_t)sizeof(float); i++)
        all &= (bits[i] & exponent) != exponent;
    PyBuffer_Release(&view);
    return PyBool_FromLong(all);
}

PyDoc_STRVAR(outside_doc, "outside(obs, next_obs, valid, bounds, steps)\n\nHow many valid rows of the first steps have a float32 in one of the first "
                          "two that is below bounds[0] or above bounds[1] of its column.");

VECTORISED
static int beyond(const float *restrict row, const float *restrict low, const float *restrict high, Py_ssize_t columns)
{
    int any = 0;
    for (Py_ssize_t i = 0; i < columns; i++)
        any |= (row[i] < low[i]) | (row[i] > high[i]);
    return any;
}

static PyObject *rows_outside(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    enum { OBS, NEXT_OBS, VALID, BOUNDS, ALL };
    if (count != ALL + 1) {
        PyErr_SetString(PyExc_TypeError, "outside() takes 5 arguments");
        return NULL;
    }
    const Py_ssize_t steps = PyLong_AsSsize_t(given[ALL]);
    if (steps == -1 && PyErr_Occurred())
        return NULL;
    Py_buffer views[ALL];
    int held = 0;
    while (held < ALL && PyObject_GetBuffer(given[held], &views[held], PyBUF_C_CONTIGUOUS) == 0)
        held++;
    PyObject *answer = NULL;
    if (held == ALL) {
        const Py_ssize_t all = views[VALID].len, most = views[VALID].ndim > 0 ? views[VALID].shape[0] : 0;
        const Py_ssize_t columns = views[BOUNDS].len / (2 * (Py_ssize_t)sizeof(float));
        const Py_ssize_t size = all * columns * (Py_ssize_t)sizeof(float), rows = most > 0 ? all / most * steps : 0;
        if (steps < 0 || steps > most)
            PyErr_SetString(PyExc_ValueError, "outside() takes at most as many steps as there are");
        else if (views[OBS].len != size || views[NEXT_OBS].len != size)
            PyErr_SetString(PyExc_ValueError, "outside() takes rows that are as wide as the bounds");
        else {
            const float *obs = views[OBS].buf, *next = views[NEXT_OBS].buf, *low = views[BOUNDS].buf, *high = low + columns;
            const char *valid = views[VALID].buf;
            long found = 0;
            for (Py_ssize_t row = 0; row < rows; row++, obs += columns, next += columns)
                found += valid[row] && (beyond(obs, low, high, columns) || beyond(next, low, high, columns));
            answer = PyLong_FromLong(found);
        }
    }
    while (held > 0)
        PyBuffer_Release(&views[--held]);
    return answer;
}

static PyMethodDef single_methods[] = {{"choose", (PyCFunction)(void (*)(void))choose, METH_FASTCALL, choose_doc}, {0}};
static PyType_Slot single_slots[] = {{Py_tp_init, single_init},
                                     {Py_tp_dealloc, single_dealloc},
                                     {Py_tp_methods, single_methods},
                                     {0}};
static PyType_Spec single_spec = {"freewheel.rollout._kernel.FastCategorical", sizeof(Single), 0, Py_TPFLAGS_DEFAULT, single_slots};
/* _watch.c */
extern const char watch_doc[], prepare_doc[], unwatch_doc[];
extern PyObject *watch_begin(PyObject *, PyObject *), *watch_prepare(PyObject *, PyObject *), *watch_end(PyObject *, PyObject *);

static PyMethodDef functions[] = {{"finite", all_finite, METH_O, finite_doc},
                                  {"outside", (PyCFunction)(void (*)(void))rows_outside, METH_FASTCALL, outside_doc},
                                  {"watch", watch_begin, METH_VARARGS, watch_doc},
                                  {"prepare", watch_prepare, METH_VARARGS, prepare_doc},
                                  {"unwatch", watch_end, METH_NOARGS, unwatch_doc},
                                  {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernel", NULL, -1, functions, NULL, NULL, NULL, NULL};

static int add_type(PyObject *made, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    const int failed = type == NULL || PyModule_AddObjectRef(made, name, type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

PyMODINIT_FUNC PyInit__kernel(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (add_type(made, "FastCategorical", &single_spec) < 0 || add_type(made, "RowWriter", &page_spec) < 0)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
