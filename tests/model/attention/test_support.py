"""The support table: refusals, documentation, and how a new backend is added."""

from dataclasses import replace

import pytest
import torch
from attention_helpers import CUDA, REQUEST, choose
from helpers import ROOT

from common.errors import UserError
from model.attention import BACKENDS, NON_SOFTMAX, AttentionRequest, resolve
from model.attention.support import ALL_DTYPES, FEATURES, Support, missing_feature

DOCS = ROOT / "docs/attention-backends.md"
MPS = torch.device("mps")
REQUEST_CUDA = replace(REQUEST, device=CUDA, dtype=torch.bfloat16)


def refusal(config, request: AttentionRequest) -> str:
    with pytest.raises(UserError) as refused:
        resolve(config, request)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "changed", "problem", "setting"),
    [
        ("flash", {"dropout_p": 0.1}, "dropout", "model.dropout=0"),
        ("flash", {"softcap": 9.0}, "softcaps", "model.attention_softcap=null"),
        ("flex", {"grad": False, "positions": True}, "positions", "batch_size=1"),
        ("flex", {"grad": False, "dtype": torch.float64}, "float64", "dtype=float32"),
        ("cudnn", {}, "does not run on cpu", "device=cuda"),
        ("flash", {"device": MPS}, "does not run on mps", "device=cpu or cuda"),
    ],
)
def test_refusal_on_cpu_names_the_setting_to_change(name, changed, problem, setting):
    message = refusal(choose(name), replace(REQUEST, **changed))
    assert message.startswith(f"attention={name} ")
    assert problem in message
    assert f"; set {setting}, or attention=naive" in message


@pytest.mark.parametrize(
    ("name", "changed", "problem", "setting"),
    [
        ("flash", {"dtype": torch.float32}, "float32", "dtype=bfloat16"),
        ("flash", {"window": 4}, "windows", "model.window=null"),
        ("flash", {"document_mask": True}, "document masks", "data.document_mask=false"),
        ("flash", {"Tq": 3}, "positions", "batch_size=1"),
        ("flex", {"dropout_p": 0.1}, "dropout", "model.dropout=0"),
        ("cudnn", {"dtype": torch.float32}, "float32", "dtype=bfloat16"),
    ],
)
def test_refusal_on_cuda_needs_no_gpu(name, changed, problem, setting):
    message = refusal(choose(name), replace(REQUEST_CUDA, **changed))
    assert message.startswith(f"attention={name} on cuda ")
    assert problem in message
    assert f"; set {setting}, or attention=naive" in message


@pytest.mark.parametrize(
    ("name", "changed", "problem"),
    [("flash", {"Dv": 4}, "Dv ≠ D"), ("flex", {}, "training")],
)
def test_refusal_without_a_setting_names_other_backends(name, changed, problem):
    message = refusal(choose(name), replace(REQUEST, **changed))
    assert problem in message
    assert "; set attention=naive" in message


def test_refusal_names_only_backends_that_support_the_request():
    message = refusal(choose("flash"), replace(REQUEST, dropout_p=0.1, softcap=9.0))
    assert message.endswith("or attention=naive")


@pytest.mark.parametrize(
    ("request_", "advice"),
    [
        (REQUEST, "device=cuda"),
        (replace(REQUEST_CUDA, dropout_p=0.1), "model.dropout=0"),
        (replace(REQUEST_CUDA, window=4), "model.window=null"),
    ],
    ids=["cpu", "dropout", "window"],
)
def test_refusal_of_a_flash_package_names_the_package(request_, advice):
    message = refusal(choose("flash", flash_package="FA3"), request_)
    assert message.startswith("attention=flash with attention.flash_package=FA3 ")
    assert f"; set {advice}, or attention=naive" in message


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_missing_only_if_the_call_uses_it(feature):
    without = replace(BACKENDS["naive"], on={"cpu": Support(lacks=(feature,))})
    plain = replace(REQUEST, G=4, grad=False)
    everything = replace(
        REQUEST,
        Dv=4,
        dropout_p=0.1,
        softcap=9.0,
        window=3,
        document_mask=True,
        positions=True,
    )
    assert missing_feature(without, plain) is None
    problem, setting = missing_feature(without, everything)
    assert problem.endswith(f"does not support {feature}")
    assert setting == FEATURES[feature]


# Documentation


def support_table() -> str:
    """The support table as Markdown. Devices with the same support share a row."""
    titles = ["`attention=`", "device", "dtypes", *FEATURES]
    rows = [titles, ["---"] * 3 + [":-:"] * len(FEATURES)]
    for chosen in [*BACKENDS.values(), *NON_SOFTMAX.values()]:
        packages = {f"cuda {name}": support for name, support in chosen.packages.items()}
        devices_by_support: dict[Support, list[str]] = {}
        for device, support in (chosen.on | packages).items():
            devices_by_support.setdefault(support, []).append(device)
        label = f"{chosen.key}={chosen.name}".removeprefix("attention=")
        for support, devices in devices_by_support.items():
            dtypes = "any" if support.dtypes == ALL_DTYPES else ", ".join(support.dtypes)
            marks = ["no" if key in support.lacks else "yes" for key in FEATURES]
            rows.append([f"`{label}`", ", ".join(devices), dtypes, *marks])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_docs_contain_the_support_table():
    table = support_table()
    message = f"replace the support table in {DOCS} by\n{table}"
    assert table in DOCS.read_text(encoding="utf-8"), message
