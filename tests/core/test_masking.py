"""Test secrets on a script's command line: passed to the script, but not recorded."""

import dataclasses
from pathlib import Path

import pytest
from searching import new_store, prepared

from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError
from autotune.core.training_source import find_script, mask_secrets, masked_options
from autotune.core.workload import Workload
from autotune.tuning.prepare import Prepared
from autotune.tuning.studies import changes_since, open_study, recorded_request

HUB_TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        ("--hub_token X --do_train", "--hub_token *** --do_train"),
        ("--hub-token -X", "--hub-token ***"),
        ("--token=X", "--token=***"),
        ("--hub_token=a=b", "--hub_token=***"),
        ("--wandb_api_key X", "--wandb_api_key ***"),
        ("--db-password X Y", "--db-password *** Y"),
        ("trainer.hub_token=X", "trainer.hub_token=***"),
        ("+aws_secret_access_key=X", "+aws_secret_access_key=***"),
        (f"--repo {HUB_TOKEN}", "--repo ***"),
        (f"--url https://user:{HUB_TOKEN}@hub", "--url https://user:***@hub"),
    ],
)
def test_secrets_are_masked(words: str, masked: str) -> None:
    assert mask_secrets(words.split()) == tuple(masked.split())
    assert len(masked_options(masked.split())) == 1


@pytest.mark.parametrize(
    "words",
    ["--pad_token <pad> --max_tokens 5 --tokenizer_name bert --new_tokens=7 --add_eos_token True", "--use_auth_token",
     "--use_auth_token True --seed 1", "--hub_token= --key_column text", "--hub_model_id me/model --metric_key f1"],
)  # fmt: skip
def test_other_options_are_left_alone(words: str) -> None:
    assert mask_secrets(words.split()) == tuple(words.split())
    assert masked_options(words.split()) == []


def of_script(folder: Path, *words: str) -> Prepared:
    """The prepared search of a script with these options."""
    (folder / "run.py").write_text("pass\n")
    given = prepared()
    workload = Workload.of_source(find_script([str(folder / "run.py"), *words]))
    return dataclasses.replace(given, request=dataclasses.replace(given.request, workload=workload))


def test_a_study_has_no_secret_and_goes_on_when_it_is_given_again(tmp_path: Path, cpu: Device) -> None:
    asked = of_script(tmp_path, "--hub_token", "sesame", "--seed", "1")
    assert asked.request.workload.document()["source"]["argv"][1] == "sesame", "the trial gets it"
    with new_store(tmp_path) as store:
        study = open_study(asked, store).study
        recorded = store.workload_of(study)
        assert recorded["source"]["argv"] == ["--hub_token", "***", "--seed", "1"]
        assert b"sesame" not in (tmp_path / "autotune.db").read_bytes()
        with pytest.raises(
            InvalidRequestError, match=r"--hub_token for run\.py, whose value is not recorded"
        ) as raised:
            recorded_request(store, study.name, "cpu")
        assert f"--study {study.name}" in raised.value.hint
        environment = store.environment(study.environment_id)
        for secret in ("another", "***"):
            again = of_script(tmp_path, "--hub_token", secret, "--seed", "1")
            assert changes_since(again, study.request, recorded, environment) == []
        other = of_script(tmp_path, "--hub_token", "sesame", "--seed", "2")
        assert len(changes_since(other, study.request, recorded, environment)) == 1
        assert other.request.workload.fingerprint() != asked.request.workload.fingerprint()
