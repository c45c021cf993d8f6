"""Test the table of options against the function, the request and the command line."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click
import pytest
from messages import check_refusals
from searching import BERT_LARGE, H200, facts

from autotune import api
from autotune.cli.main import cli
from autotune.cli.options import options_given
from autotune.core.arguments import check_arguments
from autotune.core.errors import InvalidRequestError
from autotune.core.option_kinds import FLAG, SCRIPT
from autotune.core.options import BY_NAME, OPTIONS, Option, options_of
from autotune.tuning.options import request_of
from autotune.tuning.prepare import prepare
from autotune.tuning.request import SearchRequest, recorded_fields, request_from_document

SIGNATURE = inspect.signature(api.search).parameters


def commands() -> dict[str, click.Command]:
    """Every command by the name that the table has for it; those of a group share the group's."""
    found: dict[str, click.Command] = {}
    for name in cli.list_commands(click.Context(cli)):
        made = cli.get_command(click.Context(cli), name)
        found[name] = next(iter(made.commands.values())) if isinstance(made, click.Group) else made
    return found


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(OPTIONS)


class TestFunction:
    def test_has_the_options_of_the_search(self) -> None:
        of_the_command_alone = {"code", "lever", "server", "priority", "dry_run", "as_json"}
        named = {o.name for o in options_of("search") if not o.is_lever}
        assert set(SIGNATURE) - {"progress"} == named - of_the_command_alone

    def test_shows_their_defaults(self) -> None:
        for name in set(SIGNATURE) - {"progress"}:
            assert SIGNATURE[name].default == BY_NAME[name].default, name

    def test_refuses_another_name(self) -> None:
        with pytest.raises(TypeError, match="search\\(\\) got an unexpected keyword argument 'modell'"):
            api.search(modell="bert-tiny")  # type: ignore[call-arg]

    def test_a_default_that_is_given_is_given(self) -> None:
        """As on the command line, beside code of the user's own that decides it."""
        with pytest.raises(InvalidRequestError, match="--padding cannot be combined with --trainer"):
            api.search(trainer="train.py:build", padding=0.0)

    def test_a_word_that_a_list_does_not_know_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="precision='fp8' is not one of 'fp32', 'tf32'"):
            check_arguments({"precision": ["fp8"]})


class TestRequest:
    def test_recorded_names_are_those_of_the_table(self) -> None:
        document = SearchRequest(BERT_LARGE, H200).document()
        fields = [each for each in recorded_fields() if each.name != "headroom" and not each.metadata["sparse"]]
        shown = {each.metadata["recorded_as"] for each in fields}
        assert set(document) == shown | {"schema_version", "model", "headroom_fraction", "headroom_bytes"}

    def test_a_record_of_a_later_version_is_refused_unless_what_is_new_is_off(self) -> None:
        document = SearchRequest(BERT_LARGE, H200).document()
        # One without a version is of the first.
        old = {name: value for name, value in document.items() if name != "schema_version"}
        for known in (old, {**document, "warp": None, "weft": False}):
            assert request_from_document(known, BERT_LARGE, H200, "s") == SearchRequest(BERT_LARGE, H200, study="s")
        for name, value, told in (("schema_version", 2, "schema version 2"), ("warp", 9, "warp")):
            with pytest.raises(ValueError, match=told):
                request_from_document({**document, name: value}, BERT_LARGE, H200, "s")

    @pytest.mark.parametrize(
        ("key", "value"),
        [("trials", 0), ("trials", True), ("tolerance", float("nan")), ("seed", -1), ("optim", []), ("objective", "x"),
         ("precision", ["fp8"]), ("measure_baseline", 1), ("headroom_fraction", -0.1), ("world_size", 1.5)],
    )  # fmt: skip
    def test_a_record_with_a_wrong_value_is_refused(self, key: str, value: Any) -> None:
        with pytest.raises(ValueError, match=key):
            request_from_document({**SearchRequest(BERT_LARGE, H200).document(), key: value}, BERT_LARGE, H200, "s")


class TestCommandLine:
    @pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.name)
    def test_each_command_has_its_options(self, option: Option) -> None:
        for name, command in commands().items():
            found = [param for param in command.params if param.name == option.name and _is_of(option, param)]
            assert len(found) == (name in option.commands), (name, option.name)
            for param in found:
                assert option.kind is SCRIPT or option.own_flag in param.opts

    @pytest.mark.parametrize("option", options_of("search"), ids=lambda o: o.name)
    def test_what_is_not_given_is_the_default(self, option: Option) -> None:
        context = _context("search")
        assert context.params[option.name] == option.default

    def test_a_flag_is_given(self) -> None:
        words = [option.parameter for option in options_of("search") if option.kind is FLAG]
        given = _context("search", words).params
        assert all(given[option.name] is not option.default for option in options_of("search") if option.kind is FLAG)

    def test_a_study_that_goes_on_keeps_what_it_was_searched_with(self) -> None:
        given = _context("resume", ["bert"]).params
        held = {each.metadata["option"] for each in recorded_fields()}
        assert all(given[option.name] is None for option in options_of("resume") if option.name in held)


def _context(command: str, words: Sequence[str] = ()) -> click.Context:
    # click keeps the help option that it makes first: the names are those of the command line.
    return commands()[command].make_context(command, list(words), help_option_names=["-h", "--help"])


def _is_of(option: Option, param: click.Parameter) -> bool:
    """Whether a parameter is the option's; verify's --study and show's STUDY are others of the same name."""
    return isinstance(param, click.Argument) == (option.kind is SCRIPT) and not (
        option.name == "study" and isinstance(param, click.Option) and "FILE" in str(param.help)
    )


class TestLevers:
    def test_one_option_says_what_the_flag_of_a_lever_says(self) -> None:
        words = ["--lever", "torch_compile=layers", "--lever", "fused-loss", "--lever", "length_multiple=64"]
        for given in (words, ["--torch-compile", "layers", "--fused-loss", "on", "--length-multiple", "64"]):
            asked = options_given(_context("search", ["--model", "bert-tiny", *given]))
            assert asked == {
                "model": "bert-tiny",
                "torch_compile": "layers",
                "fused_loss": "on",
                "length_multiple": "64",
            }
        in_python = check_arguments({"levers": {"torch_compile": "layers", "fused_loss": True, "length_multiple": 64}})
        assert in_python == {"torch_compile": "layers", "fused_loss": "on", "length_multiple": "64"}

    def test_messages_of_levers_that_are_refused(self) -> None:
        wrong = ("cuda_graps=off", "float8=maybe", "length_multiple", "float8 float8=off")
        words = {line: [word for each in line.split() for word in ("--lever", each)] for line in wrong}
        check_refusals("levers", {line: partial(_context, "search", words[line]) for line in wrong})

    def test_levers_of_a_prediction_are_those_that_change_it(self) -> None:
        assert _context("predict", ["--lever", "fused_loss"]).params["fused_loss"] == "on"
        with pytest.raises(InvalidRequestError, match="there is no lever 'cuda_graphs'"):
            _context("predict", ["--lever", "cuda_graphs"])

    def test_levers_off_leaves_those_that_are_named(self) -> None:
        asked = {"model": "bert-base-uncased", "effective_batch": 8, "levers": "off", "cuda_graphs": "auto"}
        request = request_of(asked, [H200])
        assert request.late_settings(None) == {"cuda_graphs"}
        assert request_of({**asked, "levers": "auto"}, [H200]).late_settings(None) > {"cuda_graphs", "torch_compile"}

    def test_layers_are_compiled_alone_in_every_arm(self) -> None:
        asked = SearchRequest(BERT_LARGE, H200, effective_batch=64, torch_compile="layers")
        assert {(arm.torch_compile, arm.regional_compilation) for arm in prepare(asked, facts()).space.arms} == {
            (True, True)
        }
        document = json.loads(json.dumps(asked.document()))
        assert request_from_document(document, BERT_LARGE, H200, "s") == replace(asked, study="s")
