"""Reads words of other libraries as options, and says where an option belongs; the words themselves are in `synonyms`.

`known` has every option of any algorithm, mode and world, with its type.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from freewheel.collect.mode import MODES
from freewheel.config import flags, synonyms
from freewheel.envs.family import WORLDS
from freewheel.errors import UsageError
from freewheel.files.read import show
from freewheel.learn.spec import ALGORITHMS
from freewheel.sinks.sink import SINKS

FREE = "env."  # --env.KEY VALUE is a keyword argument of the environment


def types_of_all(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the type of everything that may be given: every option, and every word for one."""
    bare = {name.rpartition(".")[2] for name in known if "." in name} | synonyms.LEARNER.keys()
    found = dict(aliases())
    for owner, word in itertools.product([*ALGORITHMS, "policy"], bare):
        if option := synonyms.learner_option(word, owner, known):
            found |= {f"{owner}.{word}": option} | ({} if word in found else {word: option})
    return {word: known.get(option, str) for word, option in found.items()} | dict(known)


@functools.cache
def aliases() -> Mapping[str, str]:
    """Return the words that do not depend on the algorithm: those of other libraries, and those of worlds."""
    own = [family.flags.aliases for family in WORLDS.values()]
    return synonyms.OPTIONS | {name: option for aliases in own for name, option in aliases.items()}


def renamed(source: str, given: flags.Flags, known: Mapping[str, Any]) -> flags.Layer:
    """Return the layer in which words that do not depend on the algorithm are replaced by what they stand for."""
    layer = flags.Layer(source, {})
    for name, value in given.items():
        if odd := next((word for word in (name, *value) if min(word, default=" ") < " "), None):
            raise UsageError(f"{flags.shortened(flags.as_flag(name))} has control characters: {show(odd)}")
        option = name if name in known else aliases().get(name, name)
        layer.add(option, value, word=name if name in synonyms.OPTIONS else option)
    for choice, names in ("algo", ALGORITHMS.ours), ("mode", {"auto", *MODES.ours, *synonyms.MODES}):
        if (written := layer.flags.get(choice)) and written[0].lower() in names:
            layer.flags[choice] = (written[0].lower(),)
    if layer.flags.get("mode") and (mode := synonyms.MODES.get(layer.flags["mode"][0])):
        layer.words[f"--mode {layer.flags['mode'][0]}"] = f"--mode {mode}"
        layer.flags["mode"] = (mode,)
    return layer


def for_algorithm(layer: flags.Layer, algo: str, known: Mapping[str, Any], *, strict: bool) -> flags.Layer:
    """Return the layer in which words for options of the algorithm and of the policy are replaced by these options.

    strict: a word that this algorithm has no option for is refused, not ignored.
    """
    found = flags.Layer(layer.source, {}, dict(layer.words), layer.trusted)
    for name, value in layer.flags.items():
        owner, _, word = name.rpartition(".")
        if name in known or name.startswith(FREE):
            found.add(name, value)
        elif option := synonyms.learner_option(word, owner or algo, known):
            found.add(option, value, word=name)
        elif strict:
            owners = [other for other in ALGORITHMS if synonyms.learner_option(word, other, known)]
            raise UsageError(f"{flags.as_flag(name)} is an option of {_either(owners)}, not of {algo}; leave it out")
    return found


@contextmanager
def naming_words(layer: flags.Layer) -> Iterator[None]:
    """Name the word of another library that was typed for an option, in an error about that option."""
    try:
        yield
    except UsageError as error:
        option, _, rest = str(error).partition(" ")
        word = next((word for word, meant in layer.words.items() if meant == option), None)
        if word is None:
            raise
        raise UsageError(f"{word}, read as {option}, {rest}") from None


#: A command in a message, or an option and the word after it, but no dashes within a path or a value.
_OPTION = re.compile(
    r"`[^`]*`|freewheel [a-z]+ [^,;:]*|(?<![\w/.=-])--(?:([a-z]+)\.)?([A-Za-z][\w-]*)"
    r"( '[^']*'| [\w.][\w./:,+-]*(?<=\w))?(?![\w/])"
)


def in_python(message: str, known: Mapping[str, Any]) -> str:
    """Rewrite a message about options as one about keyword arguments: ppo={"lr": 0.1} for --ppo.lr 0.1. Lines after the
    first, and options of other programs, do not change."""

    def argument(found: re.Match[str]) -> str:
        group, name, after = found[1], flags.canonical(found[2] or ""), found[3] or ""
        full = f"{group}.{name}" if group else name
        if not name or not (full in known or group == "env" or any(one.startswith(f"{name}.") for one in known)):
            return found[0]
        value = _in_python(name, known.get(full), after[1:])
        rest = "," * message.startswith(" --", found.end()) if value else after
        if group:
            return f'{"env_args" if group == "env" else group}={{"{name}": {value or "..."}}}{rest}'
        if known.get(name) is bool and message[: found.start()].endswith(("say ", "add ")):
            value = "True"
        return (f"{name}={value}" if value else name) + rest

    first, end, report = message.partition("\n")
    return _OPTION.sub(argument, first) + end + report


def _in_python(name: str, kind: Any, word: str) -> str:
    """Return the word after an option as its Python value; empty: it is not a value, but belongs to the sentence."""
    if word.isupper():  # a placeholder for a value
        return word
    names: Any = {"algo": ALGORITHMS, "mode": ("auto", *MODES, *synonyms.MODES), "sinks": SINKS}.get(name, ())
    kinds = [kind, *(flags.option_types(mode.config, flat=True).get(name) for mode in MODES.values())]
    choices = {part for one in kinds for part in _parts(one)}.union(names)
    if choices & {int, float} and re.fullmatch(r"[\d.]+(e[+-]?\d+)?|\d{1,3}(,\d{3})+", word):
        return word.replace(",", "")
    if bool in choices and word in ("true", "false"):
        return word.capitalize()
    if word in choices or word.startswith(("'", "./")) or (name == "device" and re.match("cpu|cuda", word)):
        bare = word.strip("'")
        return f'["{bare}"]' if typing.get_origin(kind) is tuple else f'"{bare}"'
    return ""


def _parts(kind: Any) -> Iterator[Any]:
    """Yield the parts of a type: classes, and the choices of a Literal."""
    inside = () if kind is flags.Table else typing.get_args(kind)
    yield from (part for one in inside for part in _parts(one)) if inside else [kind]


class Chosen(NamedTuple):
    """The choices that make a run, for messages."""

    algo: str
    mode: str
    env: str


def check_given(given: flags.Layer, has: Mapping[str, Any], chosen: Chosen, known: Mapping[str, Any]) -> list[str]:
    """Refuse given options that this run does not have, but another world, algorithm or mode. Such options in files are
    ignored, because one file may serve many runs.

    Returns notes about options that ask for what is true anyway.
    """
    notes = []
    for name, value in given.flags.items():
        if name.endswith(".temperature") and value[0].startswith("auto"):
            first = f"say {flags.as_flag(name.replace('temperature', 'first_temperature'))} {value[0][5:]}, from which"
            remedy = "leave it out, and" if value[0] == "auto" else first
            raise UsageError(f"{flags.as_flag(name)} takes a number, which is kept: {remedy} it is learned")
        if name in has or name.startswith(FREE):
            continue
        if name not in synonyms.IDLE or value not in (("True",), ("true",)):
            raise UsageError(f"{flags.as_flag(name)} {_where_it_belongs(name, chosen, known)}")
        notes.append(f"{flags.as_flag(name)} changes nothing on {chosen.env}: {synonyms.IDLE[name]} there anyway")
    return notes


def modes_with(given: flags.Layer) -> list[str]:
    """Return the modes that have all given options of modes; UsageError if there is none. Modes that are used only on
    request are returned only if no other mode fits."""
    options = {name: flags.option_types(mode.config) for name, mode in MODES.items()}
    asked = [name for name in given.flags if any(name in types for types in options.values())]
    if not (fitting := [mode for mode, types in options.items() if all(name in types for name in asked)]):
        raise UsageError(f"no mode has all of {', '.join(map(flags.as_flag, asked))}; leave out one of them")
    return [mode for mode in fitting if not MODES[mode].on_request] or fitting


def _where_it_belongs(name: str, chosen: Chosen, known: Mapping[str, Any]) -> str:
    """Say to what an option belongs that this run does not have, and what to do."""
    owner, _, last = name.rpartition(".")
    if owner:
        instead = synonyms.learner_option(last, chosen.algo, known)
        remedy = f"write {flags.as_flag(instead)}" if instead else f"add --algo {owner} or leave it out"
        return f"is an option of {owner}, and this run learns with {chosen.algo}; {remedy}"
    modes = [one.name for one in MODES.values() if name in flags.option_types(one.config, flat=True)]
    if modes:
        mode = "continuous" if "continuous" in modes else modes[0]
        return f"is an option of mode {_either(modes)}, not of {chosen.mode}; add --mode {mode} or leave it out"
    worlds = [one.name for one in WORLDS.values() if name in flags.option_types(one.options, flat=True)]
    return f"is an option of {_either(worlds)} environments, and {chosen.env} is none of them; leave it out"


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def place_of(name: str, value: Callable[..., Any]) -> str:
    """Return the name (module:name) by which a network's class or function is found again."""
    if name.rpartition(".")[2] != "module":
        way = "--ppo.lr-schedule linear lets the learning rate fall, and a hook sets run.learning_rate (docs/hooks.md)"
        raise UsageError(f"{name} in train() takes a value, not a function: {way}")
    if not str(called := getattr(value, "__qualname__", "")).isidentifier():
        wanted = (
            "define the class or function at the top of a file or a notebook cell; it is called with the PolicySpec"
        )
        raise UsageError(f"policy.module cannot be {flags.shortened(called or repr(value))}: {wanted}")
    return f"{value.__module__}:{called}"


def literal(word: str) -> Any:
    """Return an environment's argument: JSON if the word is valid JSON, else the word itself."""
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(word, word)
