"""Teachers and a student: their targets, what each model starts with, and runs that resume."""

import itertools
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import ADAMW, load, metrics, run_command, summary, tiny_model, train_step
from run_helpers import assert_same_run, copy_here, train_in

from common.checkpoint_file import save_checkpoint
from data import DataConfig, TokenizerConfig
from data.loader import Loader
from data.prepare import prepare
from generation.load import load_run
from model.loss import IGNORE_INDEX
from training.config import STUDENT_LENGTH, TrainConfig
from training.optimizer import build_optimizers
from training.runtime import Dist
from training.schedule import ScheduleConfig
from training.teachers import (
    make_teacher,
    mean_probabilities,
)
from training.train_state import TrainState

TWO_TEACHERS = ["train.n_teachers=2", "train.steps=4", "schedule.warmup_steps=1"]
LAST_STEP = 2 * 4 + STUDENT_LENGTH * 4
B, T, V = 3, 8, 20


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, V, (2, B, T), generator=generator)
    targets[0, :3] = IGNORE_INDEX
    return tokens, targets


def different_models(n: int) -> list:
    """Models of float64 with large and different weights."""
    models = []
    for seed in range(n):
        torch.manual_seed(seed)
        model = tiny_model().double()
        for p in model.parameters():
            torch.nn.init.normal_(p.detach(), std=0.5)
        models.append(model.eval())
    return models


def probabilities_by_hand(models, tokens, targets):
    """Row by row, in float64."""
    expected = torch.zeros(B, T, V, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            if targets[b, t] == IGNORE_INDEX:
                continue
            for model in models:
                logits = model(tokens[b : b + 1])[0, t]
                expected[b, t] += logits.exp() / logits.exp().sum() / len(models)
    return expected.detach()


# The targets of a student


@pytest.mark.parametrize("n_teachers", [1, 3])
def test_targets_are_the_mean_of_the_teachers_probabilities(batch, n_teachers):
    models = different_models(n_teachers)
    probabilities = mean_probabilities(models, *batch, None, nullcontext())
    torch.testing.assert_close(
        probabilities.double(), probabilities_by_hand(models, *batch), atol=1e-6, rtol=0
    )


def test_targets_respect_documents(batch):
    tokens, targets = batch
    models = different_models(2)
    doc_ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]).expand(B, T)
    probabilities = mean_probabilities(models, tokens, targets, doc_ids, nullcontext())
    alone = mean_probabilities(models, tokens[:, 4:], targets[:, 4:], None, nullcontext())
    torch.testing.assert_close(probabilities[:, 4:], alone, atol=1e-6, rtol=0)


def test_loss_of_a_student_is_the_cross_entropy_of_its_teachers(batch):
    tokens, _ = batch
    student, *teachers = different_models(3)
    by_hand = probabilities_by_hand(teachers, *batch)
    log_q = student(tokens).log_softmax(-1)
    expected = -(by_hand * log_q).sum()
    probabilities = mean_probabilities(teachers, *batch, None, nullcontext()).double()
    loss = student(tokens, probabilities, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_teacher_is_a_copy_that_is_not_trained():
    model = tiny_model()
    teacher = make_teacher(model, model.state_dict())
    before = {name: p.clone() for name, p in model.state_dict().items()}
    train_step(model, build_optimizers(model, ADAMW))
    torch.testing.assert_close(dict(teacher.state_dict()), before, atol=0, rtol=0)
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())


# One model after the other


def make_state(**limits) -> TrainState:
    """The state of a run without warmup, with a tiny model."""
    model = tiny_model()
    optimizers = build_optimizers(model, ADAMW)
    config = TrainConfig(**{"steps": None, "n_teachers": 2} | limits)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    schedule = ScheduleConfig(warmup_steps=0)
    return TrainState(config, schedule, model, optimizers, scaler, steps_per_epoch=8.0)


def train_to_the_end(
    state: TrainState, clock: list[float], first_step: float = 1.0
) -> list[tuple[str, float]]:
    """Count the steps of a run. Returns role and learning rate of each.

    first_step: seconds of the first step; the others take one second.
    """
    steps = []
    state.start_clock()
    while not state.is_done:
        if state.model_progress >= 1:
            state.start_next_model(seed=1)
        steps.append((state.role, state.lr_scale))
        clock[0] += first_step if state.step == 0 else 1.0
        state.count_step(Dist(), signal_received=False)
    return steps


@pytest.mark.parametrize(
    "limits",
    [{"steps": 4}, {"epochs": 0.5}, {"steps": 4, "minutes": 9.0}],
    ids=["steps", "epochs", "steps before minutes"],
)
def test_teachers_are_equally_long_and_the_student_is_longer(limits, clock):
    roles = [role for role, _ in train_to_the_end(make_state(**limits), clock)]
    of_student = [", student"] * 4 * STUDENT_LENGTH
    assert roles == [", teacher 1 of 2"] * 4 + [", teacher 2 of 2"] * 4 + of_student


@pytest.mark.parametrize("limits", [{"steps": 4}, {"epochs": 0.5}], ids=str)
def test_learning_rate_falls_for_each_model(limits, clock):
    rates = [rate for _, rate in train_to_the_end(make_state(**limits), clock)]
    of_student = [1 - n / (4 * STUDENT_LENGTH) for n in range(4 * STUDENT_LENGTH)]
    assert rates == pytest.approx([1, 0.75, 0.5, 0.25] * 2 + of_student)


def test_progress_is_the_used_part_of_the_time_of_a_run(clock):
    """A step of the student of two teachers needs 5 / 3 of the time of another one."""
    state = make_state(steps=4)
    progress = []
    while not state.is_done:
        if state.model_progress >= 1:
            state.start_next_model(seed=1)
        state.count_step(Dist(), signal_received=False)
        progress.append(state.progress)
    step_costs = [1] * 8 + [5 / 3] * 4 * STUDENT_LENGTH
    expected = [cost / sum(step_costs) for cost in itertools.accumulate(step_costs)]
    assert progress == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "n_teachers"), [(1000, 4), (4 * 5.9, 4), (4 * 5.8, 3), (4 * 3.2, 2), (4 * 3.1, 0)]
)
@pytest.mark.parametrize("length", [{"steps": 4}, {"epochs": 0.5}], ids=str)
def test_number_of_teachers_fits_into_the_time(length, seconds, n_teachers, clock):
    """A model needs 4 seconds. Students of 4, 3 and 2 teachers get at least 7.3, 6 and 4.7: half of
    a model's time, and a third for each teacher."""
    state = make_state(**length, minutes=seconds / 60, n_teachers=4)
    roles = [role for role, _ in train_to_the_end(state, clock)]
    assert roles[:4] == [", teacher 1 of 4"] * 4
    assert len(state.teachers) == n_teachers
    assert (", student" in roles) == (n_teachers > 0)
    student_steps = roles[4 * max(1, n_teachers) :]
    assert set(student_steps) == ({", student"} if n_teachers else set())
    if n_teachers:
        assert 2 <= len(student_steps) <= 4 * STUDENT_LENGTH
    assert (len(student_steps) == 4 * STUDENT_LENGTH) == (seconds == 1000)
    assert state.progress == 1


@pytest.mark.parametrize("n_teachers", [2, 8])
def test_learning_rate_of_a_student_falls_from_the_end_of_its_warmup(n_teachers, clock):
    """Also if there is no time for all of eight teachers."""
    state = make_state(steps=4, n_teachers=n_teachers)
    state.schedule.warmup_steps = 1
    state.teachers = [None, None]
    state.planned_teachers = 2
    rates = []
    while not state.is_done:
        rates.append(state.lr_scale)
        state.count_step(Dist(), signal_received=False)
    last = 4 * STUDENT_LENGTH
    assert rates == pytest.approx([0.5] + [(last - n) / (last - 1) for n in range(1, last)])


def test_run_that_had_no_time_for_teachers_gets_them_with_more_minutes(clock):
    state = make_state(steps=4, minutes=4 * 3 / 60, n_teachers=4)
    train_to_the_end(state, clock)
    assert (state.step, state.teachers) == (4, [])
    resumed = make_state(steps=4, minutes=1.0, n_teachers=4)
    resumed.load_state_dict(state.state_dict())
    assert not resumed.is_done
    roles = [role for role, _ in train_to_the_end(resumed, clock)]
    of_teachers = [f", teacher {n} of 4" for n in (2, 3, 4) for _ in range(4)]
    assert roles == of_teachers + [", student"] * 4 * STUDENT_LENGTH


def test_time_limit_that_ends_a_teacher_early_lowers_its_learning_rate_to_zero(clock):
    """As without teachers."""
    limits = {"steps": 100, "minutes": 0.2}
    rates = [train_to_the_end(make_state(**limits, n_teachers=n), clock) for n in (2, None)]
    assert [rate for _, rate in rates[0]] == [rate for _, rate in rates[1]]
    assert len(rates[0]) == 12


def test_extended_run_trains_its_student_longer(clock):
    state = make_state(steps=4)
    train_to_the_end(state, clock)
    state.config.steps = 8
    last_step = 8 * STUDENT_LENGTH
    expected = [(", student", 1 - n / last_step) for n in range(last_step // 2, last_step)]
    assert train_to_the_end(state, clock) == expected


@pytest.mark.parametrize("first_step", [1, 60], ids=["eager", "compiled"])
def test_time_of_a_slow_first_step_is_not_expected_of_other_models(first_step, clock):
    state = make_state(steps=4, minutes=2.0, n_teachers=4)
    state.schedule.warmup_steps = 1
    roles = [role for role, _ in train_to_the_end(state, clock, first_step)]
    assert len(roles) == (4 + STUDENT_LENGTH) * 4
    assert roles[-1] == ", student"


@pytest.mark.parametrize("warmup_steps", [4, 9])
def test_teacher_that_ends_in_its_warmup_counts_completely(warmup_steps, clock):
    """A model needs 4 seconds, and there is time for 4 models and their student."""
    state = make_state(steps=4, minutes=2.0, n_teachers=4)
    state.schedule.warmup_steps = warmup_steps
    roles = [role for role, _ in train_to_the_end(state, clock)]
    assert len(roles) == (4 + STUDENT_LENGTH) * 4
    slow = make_state(steps=4, minutes=4 * 3.1 / 60, n_teachers=4)
    slow.schedule.warmup_steps = warmup_steps
    assert len(train_to_the_end(slow, clock)) == 4


def test_run_whose_time_was_over_in_its_first_teacher_plans_teachers_again(clock):
    state = make_state(steps=4, minutes=3 / 60, n_teachers=4)
    train_to_the_end(state, clock)
    assert (state.step, state.planned_teachers) == (3, 0)
    resumed = make_state(steps=4, minutes=1.0, n_teachers=4)
    resumed.load_state_dict(state.state_dict())
    assert resumed.role == ", teacher 1 of 4"


def test_student_of_two_teachers_gets_what_the_second_one_has_left_of_the_time(clock):
    """The first teacher needs 4 seconds, the second one 40."""
    state = make_state(steps=4, minutes=0.9, n_teachers=8)
    state.start_clock()
    roles = []
    while not state.is_done:
        if state.model_progress >= 1:
            state.start_next_model(seed=1)
        roles.append(state.role)
        clock[0] += 10 if len(state.teachers) == 1 else 1
        state.count_step(Dist(), signal_received=False)
    assert roles[4:] == [", teacher 2 of 8"] * 4 + [", student"] * 10


def test_student_that_is_not_quite_trained_is_not_finished():
    """The progress of the run rounds to 1."""
    state = make_state(epochs=1.1, n_teachers=3)
    state.teachers = [None, None, None]
    state.steps_per_epoch = 50.0
    state.step = 55 * STUDENT_LENGTH
    assert state.model_progress < 1
    assert state.progress == 1
    assert not state.is_done


def test_run_without_teachers_has_one_model(clock):
    steps = train_to_the_end(make_state(steps=4, n_teachers=None), clock)
    assert steps == [("", 1.0), ("", 0.75), ("", 0.5), ("", 0.25)]


@pytest.fixture
def state():
    """The state of a run whose first teacher is trained."""
    state = make_state(steps=4)
    for seed in range(4):
        train_step(state.model, state.optimizers, seed)
        state.count_step(Dist(), signal_received=False)
    return state


def weights_of(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_each_teacher_has_other_initial_weights(state):
    first = weights_of(tiny_model())
    state.start_next_model(seed=1)
    second = weights_of(state.model)
    assert (first - second).abs().max() > 0.01
    state.planned_teachers = 3
    state.start_next_model(seed=1)
    assert (weights_of(state.model) - second).abs().max() > 0.01


def test_initial_weights_of_teachers_depend_on_the_seed(state):
    weights = []
    for seed in (1, 1, 2):
        state.teachers.clear()
        state.start_next_model(seed)
        weights.append(weights_of(state.model))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_student_continues_from_the_last_teacher(state):
    state.start_next_model(seed=1)
    train_step(state.model, state.optimizers)
    trained = weights_of(state.model)
    state.start_next_model(seed=1)
    assert state.is_student
    assert torch.equal(weights_of(state.model), trained)
    assert torch.equal(weights_of(state.teachers[1]), trained)


def test_new_model_has_a_new_optimizer(state):
    assert state.optimizers[0].state
    state.start_next_model(seed=1)
    assert not state.optimizers[0].state


def weight_decays(state: TrainState) -> set[float]:
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    return {group["weight_decay"] for group in groups}


@pytest.mark.parametrize("n_teachers", [2, 8])
def test_only_the_student_has_no_weight_decay(state, n_teachers):
    """Also if it resumes, and if there was no time for all of eight teachers."""
    of_teachers = weight_decays(state)
    assert max(of_teachers) > 0
    state.start_next_model(seed=1)
    assert weight_decays(state) == of_teachers
    state.start_next_model(seed=1)
    assert weight_decays(state) == {0.0}
    resumed = make_state(steps=4, n_teachers=n_teachers)
    resumed.load_state_dict(state.state_dict())
    assert weight_decays(resumed) == {0.0}


def test_checkpoint_restores_teachers_and_the_start_of_the_model(state):
    state.start_next_model(seed=1)
    restored = make_state(steps=4)
    restored.load_state_dict(state.state_dict())
    assert (restored.model_start_step, restored.role) == (4, ", teacher 2 of 2")
    assert restored.model_start_seconds == state.model_start_seconds
    assert torch.equal(weights_of(restored.teachers[0]), weights_of(state.teachers[0]))


def test_checkpoint_of_an_earlier_version_has_no_teachers():
    state = make_state(steps=4, n_teachers=None)
    saved = state.state_dict()
    for key in ("teachers", "planned_teachers", "model_start_step", "model_start_seconds"):
        del saved[key]
    state.load_state_dict(saved)
    assert state.teachers == []


# Complete runs


@pytest.fixture(scope="module")
def folder_with_a_student(tmp_path_factory) -> Path:
    """A folder with the run "whole", of two teachers and a student. Tests only read it."""
    folder = tmp_path_factory.mktemp("student")
    train_in(folder, "name=whole", *TWO_TEACHERS)
    return folder


@pytest.fixture
def student(folder_with_a_student, workdir):
    copy_here(folder_with_a_student)


def test_loss_of_a_run_is_the_one_by_hand(student):
    """The first step of the student: in float64, from the saved teachers."""
    teachers = [model_of(weights) for weights in load("whole")["teachers"]]
    assert len(teachers) == 2
    rows = {row["step"]: row for row in metrics("whole")}
    x = training_inputs(step=8)
    by_hand = sum(teacher(x).softmax(-1) for teacher in teachers) / 2
    log_q = teachers[1](x).log_softmax(-1)  # the student starts with the last teacher's weights
    expected = -(by_hand * log_q).sum(-1).mean().item()
    assert rows[9]["train/loss"] == pytest.approx(expected, rel=1e-5)


def model_of(weights):
    model, _ = load_run("whole")
    model.load_state_dict(weights)
    return model.double()


def training_inputs(step: int):
    """The inputs of a step of the run."""
    config = load("whole")["config"]
    data = prepare(DataConfig(**config["data"]), TokenizerConfig(**config["tokenizer"]), 8)
    loader = Loader(data, config["model"]["block_size"], config["seed"])
    loader.select_order(2)
    batch_size = config["train"]["batch_size"]
    return loader.batch("train", step * batch_size, batch_size)[0]


def test_later_teachers_are_evaluated_at_their_end_only_and_students_less_often(train):
    assert train("name=a", *TWO_TEACHERS, "eval.every=1") == 0
    evaluated = [row["step"] for row in metrics("a") if "val/loss" in row]
    of_student = [step for step in range(9, LAST_STEP + 1) if step % STUDENT_LENGTH == 0]
    assert evaluated == [0, 1, 2, 3, 4, 8, *of_student]


def test_rows_have_the_number_of_trained_teachers(student):
    assert [row["teachers"] for row in metrics("whole")] == [0] * 5 + [1] * 4 + [2] * (
        LAST_STEP - 8
    )


@pytest.mark.parametrize("checkpoint", ["best", "last"])
def test_student_samples_scores_and_exports_as_any_model(student, sample, evaluate, checkpoint):
    words = ["run=whole", f"checkpoint={checkpoint}"]
    assert sample(*words, "max_new_tokens=4", "prompt=a")
    assert "beginning" in evaluate(*words, "data.path=text.txt")
    assert run_command("export", *words, "out=exported") == 0
    assert Path("exported/model.safetensors").exists()


def test_run_with_teachers_never_warns_of_overfitting(train, capsys):
    assert train("name=a", *TWO_TEACHERS, "eval.every=1", "optimizer.lr=0.1") == 0
    assert "overfitting" not in capsys.readouterr().out
    assert summary("a")["overfitting"] is False


@pytest.mark.parametrize("step", [2, 4, 6, 8, 10, LAST_STEP])
def test_killed_run_with_teachers_is_bit_identical(folder_with_a_student, student, train, step):
    """Killed while a checkpoint of any model, or of its last step, is written."""

    def save_or_crash(path, content):
        if path.stem == "last" and content["step"] == step:
            raise ZeroDivisionError
        save_checkpoint(path, content)

    words = ["name=killed", *TWO_TEACHERS, "checkpoint.every=2"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("training.checkpoint.save_checkpoint", save_or_crash)
        train(*words)
    assert train(*words) == 0
    assert_same_run("whole", "killed")
    torch.testing.assert_close(
        load("killed")["teachers"], load("whole")["teachers"], atol=0, rtol=0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.compiles)])
def test_gpu_trains_teachers_and_a_student_as_the_cpu_does(student, train, compiles):
    words = ["device=cuda", f"compile={str(compiles).lower()}"]
    assert train("name=gpu", *TWO_TEACHERS, *words) == 0
    for one, two in zip(metrics("whole"), metrics("gpu"), strict=True):
        assert one.get("train/loss") == pytest.approx(two.get("train/loss"), abs=1e-3)


def test_micro_batches_do_not_change_a_student(student, train):
    assert train("name=split", *TWO_TEACHERS, "train.micro_batch_size=1") == 0
    for one, two in zip(metrics("whole"), metrics("split"), strict=True):
        assert one.get("train/loss") == pytest.approx(two.get("train/loss"), abs=1e-5)


def test_each_model_reads_the_text_in_another_order(workdir, train, monkeypatch):
    """A run that resumes has the order of its model."""
    numbers = []
    read = Loader._train_batch

    def read_and_record(self, sequences):
        numbers.append(self.order_number)
        return read(self, sequences)

    monkeypatch.setattr(Loader, "_train_batch", read_and_record)
    assert train("name=a", *TWO_TEACHERS) == 0
    assert numbers == [0] * 4 + [1] * 4 + [2] * (LAST_STEP - 8)
    assert train("name=a", *TWO_TEACHERS, "train.steps=5") == 0
    assert numbers[LAST_STEP:] == [2] * STUDENT_LENGTH


def test_output_says_which_model_is_trained(workdir):
    printed = train_in(workdir, "name=a", *TWO_TEACHERS, "eval.every=4")
    assert "for each of 2 teachers, and more for their student" in printed
    for line in (
        "step 4, teacher 1 of 2: ",
        "step 8, teacher 2 of 2: ",
        f"step {LAST_STEP}, student: ",
    ):
        assert line in printed


def test_run_without_time_for_teachers_says_so(workdir):
    printed = train_in(workdir, "name=a", *TWO_TEACHERS, "train.minutes=1e-6")
    assert "with up to 2 teachers and a student" in printed
    assert "train.minutes has no time for two teachers and a student" in printed
    assert summary("a")["n_teachers"] == 0


def test_run_with_a_student_cannot_become_shorter(student, train, capsys):
    assert train("name=whole", *TWO_TEACHERS, "train.steps=3") == 2
    error = f"has reached train.steps=4 (now 3) at step {LAST_STEP}; set a larger value"
    assert error in capsys.readouterr().err


def test_number_of_teachers_of_a_run_cannot_change(student, train, capsys):
    assert train("name=whole", *TWO_TEACHERS, "train.n_teachers=3") == 2
    assert "train.n_teachers=2 (now 3)" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["train.patience=3", "train.init_from=hf:a"])
def test_setting_that_does_not_fit_teachers_is_refused(train, capsys, word):
    with pytest.raises(SystemExit, match="2"):
        train("name=a", *TWO_TEACHERS, word, "tokenizer=byte")
    assert "train.n_teachers" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_plan_counts_the_passes_of_teachers(train, capsys):
    """A student's step with 3 teachers has the FLOPs of two steps of a teacher."""
    flops = []
    printed = ""
    steps = 10 * (3 + 2 * STUDENT_LENGTH)
    for words in ([f"train.steps={steps}"], ["train.steps=10", "train.n_teachers=3"]):
        assert train("plan=true", "flops_per_second=1e9", *words) == 0
        printed = capsys.readouterr().out
        flops += re.findall("(?m)^FLOPs .*", printed)
    assert len(flops) == 2
    assert flops[0] == flops[1]
    assert f"{10 * (3 + STUDENT_LENGTH)}, of 3 teachers and their student: " in printed
    assert "  teachers " in printed  # of the memory
