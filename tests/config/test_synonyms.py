"""Words of other libraries: each stands for an option of ours, alike on a command line, in Python and in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from freewheel.collect.mode import MODES
from freewheel.config import flags, synonyms
from freewheel.config.resolve import RunConfig, all_names, answers_in_python, from_argv, from_file, from_options
from freewheel.config.translation import in_python
from freewheel.errors import UsageError
from freewheel.learn.spec import ALGORITHMS
from freewheel.policies.spec import PolicyConfig

#: A valid value of every option that a word stands for, other than its default.
VALUES: dict[str, object] = {"algo": "sac", "env": "Pendulum-v1", "runs_dir": "there"}
VALUES |= {"run": "mine", "wandb_project": "mine"}
VALUES |= dict.fromkeys(("steps", "episodes", "eval_episodes", "num_steps_per_env", "collection_batch_size"), 7)
VALUES |= {"num_envs": 4, "workers": 4, "envs_per_worker": 3}
HALVES = ("lr", "gae_lambda", "clip", "entropy", "temperature", "gamma", "tau", "target_kl")
LEARNED: dict[str, object] = dict.fromkeys(HALVES, 0.5)
LEARNED |= dict.fromkeys(("priority_alpha", "priority_beta", "entropy_share"), 0.3)
LEARNED |= {"value": 0.25, "max_grad_norm": 2.0, "epochs": 3, "minibatch": 32, "batch": 32, "buffer": 5000, "n_step": 3}
LEARNED |= {"normalize_advantage": False, "hidden": (5, 6), "activation": "relu", "normalize_obs": True}
LEARNED |= {"learning_starts": 77}
#: Without which an option has no effect.
NEEDED = {key: {"sac.priority": "td"} for key in ("priority_alpha", "priority_beta")}

OWNERS: dict[str, type[Any]] = {"policy": PolicyConfig, **{algo.name: algo.config for algo in ALGORITHMS.values()}}
KNOWN = {f"{owner}.{name}" for owner, kind in OWNERS.items() for name in flags.option_types(kind)}
RUN: list[type[Any]] = [RunConfig, *(mode.config for mode in MODES.values())]
KNOWN |= {name for kind in RUN for name in flags.option_types(kind, flat=True)}


def written(**options: object) -> dict[str, object]:
    return flags.flatten(from_options("Pendulum-v1", {"mode": "continuous", **options}).to_json())


@pytest.mark.parametrize(("word", "option"), synonyms.OPTIONS.items())
def test_a_word_for_an_option_of_the_run(word: str, option: str) -> None:
    value = VALUES[option]
    assert written(**{word: value})[option] == value
    argv = [f"--{word.replace('_', '-')}", str(value), "--mode", "continuous"]
    config = from_argv(argv if option == "env" else ["Pendulum-v1", *argv])
    assert flags.flatten(config.to_json())[option] == value
    assert config.sources[option] == "flag"
    assert config.notes == (f"read --{word.replace('_', '-')} as --{option.replace('_', '-')}",)


BARE = ("lr", "gamma", "gae_lambda", "target_kl", "tau", "learning_starts", "hidden")  # the last part of an option


@pytest.mark.parametrize("word", [*synonyms.LEARNER, *BARE])
def test_a_word_for_an_option_of_the_learner(word: str) -> None:
    names = synonyms.LEARNER.get(word, (word,))
    options = [*(f"{algo}.{name}" for algo in ("ppo", "sac") for name in names), *(f"policy.{name}" for name in names)]
    found = [option for option in options if option in KNOWN]
    assert found
    for option in found:
        owner, _, name = option.rpartition(".")
        algo = "ppo" if owner == "policy" else owner
        value = LEARNED[name]
        needed = NEEDED.get(name, {})
        assert written(algo=algo, **{word: value}, **needed)[option] == value
        assert written(algo=algo, **{algo: {word: value}}, **needed)[option] == value


def test_words_are_the_same_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({"env_id": "Pendulum-v1", "mode": "v2", "learning_rate": 0.5, "n_envs": 4, "tau": 0.5}))
    config = from_file(file)
    options = flags.flatten(config.to_json())
    assert (config.mode, options["ppo.lr"], options["num_envs"]) == ("batch", 0.5, 4)
    assert config.sources["ppo.lr"] == f"file {file}"
    assert config == from_options("Pendulum-v1", {"mode": "batch", "ppo.lr": 0.5, "num_envs": 4})


@pytest.mark.parametrize(("word", "mode"), synonyms.MODES.items())
def test_modes_have_other_names(word: str, mode: str) -> None:
    config = from_argv(["Pendulum-v1", "--mode", word])
    assert (config.mode, config.notes) == (mode, (f"read --mode {word} as --mode {mode}",))
    assert from_options("Pendulum-v1", {"mode": word}).mode == mode in MODES


def test_a_preset_may_say_which_algorithm_a_word_is_for() -> None:
    config = from_argv(["Pendulum-v1", "--preset", "drone-sac", "--learning-rate", "0.5"])
    assert flags.flatten(config.to_json())["sac.lr"] == 0.5


@pytest.mark.parametrize("word", synonyms.ANSWERS)
def test_what_is_done_in_another_way_is_answered(word: str) -> None:
    flag = f"--{word.replace('_', '-')}"
    with pytest.raises(UsageError) as caught:
        from_argv(["Pendulum-v1", flag, "3"])
    assert str(caught.value) == f"there is no {flag}: {synonyms.ANSWERS[word]}"
    told = rf"^(there is no {word} in train\(\): |(policy|env_args) in train\(\) (is|must be) a table)"
    with pytest.raises(UsageError, match=told):
        from_options("Pendulum-v1", {word: 3})


def test_words_that_hold_a_table_elsewhere_are_answered_as_well() -> None:
    with pytest.raises(UsageError, match=r"^there is no --env-kwargs.g: say --env.KEY VALUE"):
        from_argv(["Pendulum-v1", "--env-kwargs.g", "3"])
    with pytest.raises(UsageError, match=r"^there is no env_kwargs.g in train\(\): say --env.KEY VALUE"):
        from_options("Pendulum-v1", {"env_kwargs": {"g": 3}})


def test_a_slip_in_a_group_of_options_is_not_taken_for_a_word_of_others() -> None:
    with pytest.raises(UsageError, match=r"^unknown option --policy.hiden; did you mean '--policy.hidden'"):
        from_argv(["Pendulum-v1", "--policy.hiden", "3"])


@pytest.mark.parametrize(("options", "answer"), [
    ({"policy": "MlpPolicy"}, r'policy in train\(\) is a table of options: .* policy=\{"hidden": ...\}, policy='),
    ({"policy": {"net_arc": [3]}}, r"unknown option policy.net_arc in train\(\); did you mean 'policy.net_arch'\?$"),
    ({"policy": {"module": lambda spec: spec}}, r"policy.module cannot be .*<lambda>: define the class or function at the top"),
    ({"n_envs": 0}, r"n_envs, read as num_envs, must be positive, not 0$"),
    ({"learning_rate": abs}, r'learning_rate in train\(\) takes a value, not a function: ppo=\{"lr_schedule": "linear"\} lets'),
    ({"num_workers": 2}, r'num_workers, read as workers, is an option of mode batch, .*; add mode="continuous" or '),
    ({"config": "/tmp/my--dir/x.json"}, r"config /tmp/my--dir/x.json (is missing|cannot be read)"),
    ({"run": "a/--b"}, 'run="a/--b" must be a plain name; runs_dir chooses the directory$'),
    ({"stepz": 3}, r"unknown option stepz in train\(\); did you mean 'steps'\?$"),
    ({"env_kwargs": 3}, r'there is no env_kwargs in train\(\): say env_args=\{"KEY": VALUE\} for each argument of the env'),
    ({"quite_other": 3}, r"unknown option quite_other in train\(\); see --help$"),
    ({"capture_video": True}, r"there is no capture_video in train\(\): train, then say freewheel play RUN --video$"),
    *(
        ({"algo": name.upper()}, f"there is no algorithm '{name.upper()}': say algo=.(ppo|sac)\\b")
        for name in synonyms.ALGORITHMS
    ),
])  # fmt: skip
def test_python_is_answered_in_its_own_words(options: dict[str, Any], answer: str) -> None:
    with pytest.raises(UsageError, match=f"^{answer}"), answers_in_python():
        from_options("Pendulum-v1", options)


@pytest.mark.parametrize(("message", "told"), [
    ("say --algo ppo --mode continuous, which", 'say algo="ppo", mode="continuous", which'),
    ("--steps 5,000 would end (--sac.tau takes 1 row)", 'steps=5000 would end (sac={"tau": ...} takes 1 row)'),
    ("use --num-envs 8, not --num-envs × --num-steps-per-env", "use num_envs=8, not num_envs × num_steps_per_env"),
    ("use --placement inline (docker run --shm-size 1g)", 'use placement="inline" (docker run --shm-size 1g)'),
    ("start one with `ray start --head`, or leave out --address", "start one with `ray start --head`, or leave out address"),
    ("say --wandb; --tensorboard and --wandb write there too", "say wandb=True; tensorboard and wandb write there too"),
    ("say --run NAME, --evals N: --init RUN begins", "say run=NAME, evals=N: init=RUN begins"),
    ("--device cuda:0,cpu: say --device cuda (or --device cpu)", 'device="cuda:0,cpu": say device="cuda" (or device="cpu")'),
    ("x does not accept --env.some-key: change it", 'x does not accept env_args={"some_key": ...}: change it'),
    ("--init mine has another; use the same --policy options", "init mine has another; use the same policy options"),
    ("--hooks ./file.py:Name, --sinks wandb needs wandb", 'hooks=["./file.py:Name"], sinks=["wandb"] needs wandb'),
    ("freewheel train --init RUN starts a new run, see --help", None),
    ("what it said\nmain.py --steps 5", None),
])  # fmt: skip
def test_options_in_a_message_are_keyword_arguments_in_python(message: str, told: str | None) -> None:
    assert in_python(message, all_names()) == (told or message)


@pytest.mark.parametrize("message", [*synonyms.ANSWERS.values(), *synonyms.ALGORITHMS.values()])
def test_answers_have_no_flags_in_python(message: str) -> None:
    told = in_python(message, all_names())
    assert "--" not in re.sub(r"freewheel [a-z]+ [^,;:]*", "", told)
    wrong = r"[.\"]}? [A-Z]{2,}\b|\.\.\.} (linear|td|true)\b|\b(algo|mode) (ppo|sac|batch|continuous)\b"
    assert not re.search(wrong, told)


def test_what_means_the_same_in_python() -> None:
    options = {"algo": "SAC", "policy": {"net_arch": [3], "module": RunConfig}, "steps": "2k"}
    config = from_options("Pendulum-v1", options)
    assert (config.algo, config.policy.hidden, config.run.limits.steps) == ("sac", (3,), 2_000)
    assert config.policy.module == "freewheel.config.resolve:RunConfig"


def test_no_word_hides_an_option() -> None:
    assert not (synonyms.OPTIONS.keys() | synonyms.LEARNER.keys() | synonyms.ANSWERS.keys()) & KNOWN
    assert not synonyms.OPTIONS.keys() & synonyms.LEARNER.keys()
    assert not synonyms.ANSWERS.keys() & (synonyms.OPTIONS.keys() | synonyms.LEARNER.keys())
    assert not synonyms.MODES.keys() & MODES.keys()
