"""The support table: refusals, documentation, and how a new backend is added."""

import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from attention_helpers import CUDA, REQUEST, choose
from data_helpers import write_file
from helpers import ROOT, summary

from common.errors import UserError
from model.attention import BACKENDS, NON_SOFTMAX, backends, resolve
from model.attention.support import ALL_DTYPES, FEATURES, Support

DOCS = ROOT / "docs/attention-backends.md"
REQUEST_CUDA = replace(REQUEST, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize(("config", "changed", "message"), [
    (choose("flash"), {"dropout_p": 0.1}, "not support dropout; set model.dropout=0, or attention=naive"),
    (choose("flash"), {"Dv": 4}, "values whose head dimension differs .* keys; set attention=naive"),
    (choose("flex"), {}, "cannot train: it has no gradients; set attention=naive"),
    (choose("flex"), {"grad": False, "dtype": torch.float64}, "not support float64; set dtype=float32, or"),
    (choose("flex"), {"grad": False, "positions": True}, "arbitrary positions; set batch_size=1, or attention=naive"),
    (choose("cudnn"), {}, "attention=cudnn does not run on cpu; set device=cuda, or attention=naive"),
    (choose("flash"), {"device": torch.device("mps")}, "not run on mps; set device=cpu or cuda, or attention=n"),
    (choose("flash", flash_package="FA3"), {}, "package=FA3 does not run on cpu; set attention.flash_package=null$"),
])  # fmt: skip
def test_refusal_on_cpu_names_the_setting_to_change(config, changed, message):
    with pytest.raises(UserError, match=message):
        resolve(config, replace(REQUEST, **changed))


@pytest.mark.parametrize(("config", "changed", "message"), [
    (choose("flash"), {"dtype": torch.float32}, "does not support float32; set dtype=bfloat16"),
    (choose("flash"), {"window": 4}, "support windows; set model.window=null, or attention=naive"),
    (choose("flash"), {"document_mask": True}, "not support document masks; set data.document_mask=false"),
    (choose("flash"), {"Tq": 3}, "queries at arbitrary positions; set batch_size=1, or attention=naive"),
    (choose("flash"), {"D": 512, "Dv": 512}, "head dimensions up to 256, not 512; set a larger model.n_head"),
    (choose("flash", flash_package="FA3"), {"dropout_p": 0.1}, "does not support dropout; set .+flash_package=null$"),
    (choose("flex"), {"dropout_p": 0.1}, "support dropout; set model.dropout=0, or attention=naive"),
    (choose("flex"), {"D": 8, "Dv": 8}, "head dimensions from 16, not 8; set a smaller model.n_head"),
    (choose("cudnn"), {"dtype": torch.float32}, "does not support float32; set dtype=bfloat16, or attention=na"),
])  # fmt: skip
def test_refusal_on_cuda_needs_no_gpu(config, changed, message):
    with pytest.raises(UserError, match=message):
        resolve(config, replace(REQUEST_CUDA, **changed))


def support_table() -> str:
    """The support table as Markdown. Devices on which a backend supports the same features share a row."""
    titles = [
        "`attention=`",
        "device",
        "dtypes",
        *(feature.title for feature in FEATURES.values()),
        "head dim",
    ]
    rows = [titles, ["---"] * 3 + [":-:"] * (len(FEATURES) + 1)]
    for chosen in [*BACKENDS.values(), *NON_SOFTMAX.values()]:
        devices_by_support: dict[Support, list[str]] = {}
        for device, support in chosen.on.items():
            devices_by_support.setdefault(support, []).append(device)
        for support, devices in devices_by_support.items():
            dtypes = "any" if support.dtypes == ALL_DTYPES else ", ".join(support.dtypes)
            smallest, largest = support.head_dims
            head_dim = (
                f"up to {largest}"
                if largest < torch.inf
                else f"from {smallest}"
                if smallest > 1
                else "any"
            )
            marks = ["yes" if getattr(support, key) else "no" for key in FEATURES]
            label = chosen.name if chosen.attention_type == "softmax" else chosen.setting
            rows.append([f"`{label}`", ", ".join(devices), dtypes, *marks, head_dim])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_docs_contain_the_support_table():
    assert support_table() in DOCS.read_text(encoding="utf-8"), (
        f"replace the support table in {DOCS} by\n{support_table()}"
    )


def test_example_backend_of_the_docs_trains_and_is_checked(train, capsys):
    function, settings = re.search(
        r"```py\n(.*?)```.*?```\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL
    ).groups()
    name = "reversed_heads"
    write_file(f"own/attention/{name}.yaml", settings)
    with patch.dict(BACKENDS):  # afterwards, the table is as before
        exec(function, dict(vars(backends)))
        assert train("--config-dir", "own", f"attention={name}", "name=new") == 0
        assert train("attention=naive", "name=naive") == 0
        new, naive = summary("new"), summary("naive")
        assert new["attention"] == {"requested": name, "resolved": name, "flash_package": None}
        assert new["last_val_loss"] == pytest.approx(naive["last_val_loss"], abs=1e-5)
        assert train("--config-dir", "own", f"attention={name}", "name=b", "model.dropout=0.1") == 2
        refusal = f"attention={name} on cpu does not support dropout; set model.dropout=0, or attention=naive"
        assert refusal in capsys.readouterr().err
        assert f"| `{name}` | cpu | any | yes | no |" in support_table()
