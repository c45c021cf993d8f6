"""One core for the whole training process: a lever of its own that no byte of memory depends on."""

from __future__ import annotations

import dataclasses

from recorded import measurement
from searching import ceiling_of

from autotune.device.chips import CHIPS
from autotune.memory import memory_class, questions
from autotune.trial import Arm, Candidate, Completed, Effort, outcome_document, outcome_from_document
from autotune.units import GIB

PLAIN = Arm("bf16")
PINNED = Arm("bf16", cpu_affinity=True)


class TestArm:
    def test_it_is_an_arm_of_its_own_and_says_so(self) -> None:
        assert PINNED != PLAIN
        assert PINNED.describe() == "bf16, pinned to one core"

    def test_it_needs_the_same_bytes(self) -> None:
        assert memory_class(PINNED) == memory_class(PLAIN)
        assert len(questions([PLAIN, PINNED], [(8, 1)], None)) == 1

    def test_stored_predictions_are_found_again(self) -> None:
        question = questions([PINNED], [(8, 1)], None)[0]
        assert "cpu_affinity" not in question.identity(CHIPS["rtx-3090"], ceiling_of(GIB))["arm"]

    def test_documents_from_before_there_was_one_are_read(self) -> None:
        parameters = Candidate(PLAIN, 8, 2).parameters()
        assert Candidate.from_parameters({**parameters, "cpu_affinity": True}).arm == PINNED
        del parameters["cpu_affinity"]
        assert Candidate.from_parameters(parameters) == Candidate(PLAIN, 8, 2)


class TestMeasurement:
    def test_what_limits_a_step_travels_with_it(self) -> None:
        measured = dataclasses.replace(
            measurement(Candidate(PINNED, 8), 0.1, GIB, GIB), gpu_busy_share=0.46, gpu_busy_cost_seconds=0.5, cpu_core=3
        )
        outcome = Completed(measured)
        assert outcome_from_document(outcome_document(outcome)) == outcome

    def test_documents_from_before_are_read(self) -> None:
        document = outcome_document(Completed(measurement(Candidate(PLAIN, 8), 0.1, GIB, GIB)))
        for name in ("gpu_busy_share", "gpu_busy_cost_seconds", "cpu_core"):
            del document["measurement"][name]
        outcome = outcome_from_document(document)
        assert isinstance(outcome, Completed)
        assert outcome.measurement.gpu_busy_share is None
        assert outcome.measurement.cpu_core is None

    def test_no_step_is_profiled_unless_asked_for(self) -> None:
        assert Effort().busy_steps == 0
