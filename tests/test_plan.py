"""Plans: what the engine does with memory, said before; what does not fit, by how much, and what would help."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_server import ROOT, STOCK_BIN, Fleet
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sparse_gguf import F16, F32, write_flash_next, write_sparse

from llama_phase import plan_kv
from llama_phase.errors import UsageError
from llama_phase.gguf_facts import ModelFacts, read_facts
from llama_phase.given_machine import with_given
from llama_phase.hardware import Gpu, Machine
from llama_phase.pcie import HIT_RATES, hit_rate, link_bytes_per_s, parse_link, passes
from llama_phase.plan import RESERVE_BYTES, Plan, make_plan, ring_depth
from llama_phase.plan_changes import changes
from llama_phase.plan_check import plan_of
from llama_phase.plan_choices import MIN_TOKENS_FLOOR, RING_LEAST, Choices
from llama_phase.plan_devices import used_by
from llama_phase.plan_draft import not_planned
from llama_phase.plan_report import Report
from llama_phase.plan_text import lines
from llama_phase.plan_ubatch import UBATCHES
from llama_phase.settings import Settings, argv

GIB = 1 << 30
CTX = Choices(ctx=32768)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_facts(write_flash_next(tmp_path_factory.mktemp("flash")))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("LLAMA_", "GGML_")):
            monkeypatch.delenv(name)


def machine(vram: str, ram: str | None = "192", pcie: str | None = "3x16") -> Machine:
    return with_given(Machine(), vram=vram, ram=ram, pcie=pcie)


# --- what is computed -------------------------------------------------------------------------------------------------


def test_slots_fill_what_the_tightest_device_leaves_and_not_one_more(flash: ModelFacts) -> None:
    plan = make_plan(flash, machine("24,20"), CTX)
    assert plan.fits and plan.slots == plan.slots_fit >= plan.slots_needed == 80
    spare = [d.free_bytes - RESERVE_BYTES - d.decode_bytes for d in plan.devices]
    assert min(spare) >= 0
    assert any(left < device.expert_bytes for left, device in zip(spare, plan.devices, strict=True))
    assert not make_plan(flash, machine("24,20"), replace(CTX, slots=plan.slots + 1)).fits
    assert make_plan(flash, machine("24,20"), replace(CTX, slots=plan.slots)).fits


@pytest.mark.parametrize("kv", ["host", "auto"])
def test_kv_in_host_memory_leaves_the_indexer_and_a_copy_of_one_layer_on_the_device(flash: ModelFacts, kv: str) -> None:
    """1M tokens: 24 GiB of K/V in 12 layers, of which `auto` finds no room for half on this device."""
    choices = replace(CTX, ctx=1 << 20)
    before = make_plan(flash, machine("40"), choices).devices[0]
    plan = make_plan(flash, machine("40"), replace(choices, kv=kv))
    after = plan.devices[0]
    moved = before.kv_bytes - after.kv_bytes
    assert moved == after.kv_host_bytes > 0 < after.kv_bytes
    layers = sum(1 for layer in flash.served_layers if layer.indexer_k)
    assert after.decode_compute_bytes - before.decode_compute_bytes == moved / layers
    assert plan.pinned_bytes >= moved and plan.host_bytes >= moved + flash.experts_bytes
    assert make_plan(flash, machine("40"), replace(choices, kv=kv, type_k="q8_0")).devices[0].kv_host_bytes == 0


@pytest.mark.parametrize(
    ("rows", "ctx", "vram", "kept"),
    [
        (None, 1 << 17, "24", 16384),
        (None, 1 << 17, "40", 3 * 16384),
        (None, 8192, "24", 8192),
        (None, 20480, "80", 20480),
        (0, 1 << 17, "40", 0),
        (5000, 1 << 17, "40", 5000),
    ],
)
def test_positions_of_host_kv_that_the_device_keeps(
    flash: ModelFacts, rows: int | None, ctx: int, vram: str, kept: int
) -> None:
    choices = replace(CTX, ctx=ctx, kv="host", kv_rows=rows)
    device = make_plan(flash, machine(vram), choices).devices[0]
    layers = sum(1 for layer in flash.served_layers if layer.indexer_k)
    assert device.kv_rows == layers * kept
    tables = layers * (22 * kept + 4 * ctx) if kept else 0
    assert device.kv_rows_bytes == device.kv_host_bytes // ctx * kept + tables
    assert make_plan(flash, machine("40"), replace(choices, kv="device")).devices[0].kv_rows_bytes == 0


def test_little_free_memory_keeps_fewer_positions_or_none(flash: ModelFacts) -> None:
    choices = replace(CTX, kv="host")
    assert choices.kept_rows(1000, 8 * 5000 * 1000) == 5000
    assert choices.kept_rows(1000, 8 * 4000 * 1000) == 0


def test_a_32nd_of_free_memory_keeps_more_positions_in_whole_steps(flash: ModelFacts) -> None:
    """As engine/tests/test-kv-place.cpp has it."""
    choices = replace(CTX, ctx=1 << 17, kv="host")
    step = 32 * 16384 * 1000
    kept = [choices.kept_rows(1000, free) for free in (step, 2 * step - 1, 2 * step, 100 * step)]
    assert kept == [16384, 16384, 2 * 16384, 1 << 17]


def test_auto_keeps_kv_that_fits_on_the_device(flash: ModelFacts) -> None:
    assert make_plan(flash, machine("64"), replace(CTX, kv="auto")).devices[0].kv_host_bytes == 0


def test_an_mtp_draft_takes_states_a_layer_and_buffers(flash: ModelFacts) -> None:
    """A state more per drafted token and slot of the server, the block's layer, a second context."""
    plan = make_plan(flash, machine("48"), CTX)
    draft = make_plan(flash, machine("48"), replace(CTX, draft_tokens=7))
    assert draft.devices[0].state_bytes == 8 * plan.devices[0].state_bytes > 0
    assert draft.devices[0].layers == plan.devices[0].layers + 1 == len(flash.layers)
    assert draft.devices[0].decode_compute_bytes > plan.devices[0].decode_compute_bytes
    assert draft.slots < plan.slots and draft.fits
    words = Report(flash, machine("48"), draft).serve_argv
    assert words[words.index("--mtp") + 1] == "auto"


def test_all_experts_of_the_draft_are_resident_when_they_fit(flash: ModelFacts) -> None:
    """Beside a chosen number of the target's: down to the byte, and one byte less leaves it as many as the target."""
    choices = replace(CTX, slots=80, draft_tokens=7)
    roomy = make_plan(flash, machine("48"), choices)
    (device,) = roomy.devices
    one = next(layer.expert_bytes for layer in flash.layers if layer.mtp)
    assert (roomy.slots, roomy.draft_slots, roomy.draft_experts) == (80, 512, 512)
    assert device.draft_slots_bytes == 512 * one == device.slots_bytes - 80 * device.expert_bytes
    for missing, n in ((0, 512), (1, 80)):
        free = device.decode_bytes + RESERVE_BYTES - missing
        plan = make_plan(flash, Machine(gpus=(Gpu(0, "", vram_free_bytes=free),)), choices)
        assert plan.draft_slots == n and plan.slots == 80 and plan.fits_vram
        budget = replace(
            choices, budgets_mib=((device.decode_compute_bytes + device.slots_bytes) // 2**20 + 1 - missing,)
        )
        assert make_plan(flash, machine("48"), budget).draft_slots == n
    said = "\n".join(lines(Report(flash, machine("48"), roomy)))
    assert "slots of the draft: 512, all its experts" in said
    said = "\n".join(lines(Report(flash, machine("24"), plan)))
    assert "slots of the draft: 80 of 512 experts per layer (more do not fit" in said
    assert make_plan(flash, machine("48"), replace(choices, slots=0)).draft_slots == 0


def test_slots_that_are_auto_leave_the_draft_as_many_and_what_is_left_over(flash: ModelFacts) -> None:
    plan = make_plan(flash, machine("24"), replace(CTX, draft_tokens=7))
    (device,) = plan.devices
    assert plan.slots_needed <= plan.slots <= plan.draft_slots < plan.slots + device.moe_layers
    spare = device.free_bytes - RESERVE_BYTES - device.decode_bytes
    assert 0 <= spare < device.draft_slots_bytes // plan.draft_slots
    assert make_plan(flash, machine("640"), replace(CTX, draft_tokens=7)).draft_slots == 512


@pytest.mark.parametrize("n", [80, 300, 512, 9999])
def test_a_number_of_slots_for_the_draft_is_kept_and_left_room_for(flash: ModelFacts, n: int) -> None:
    choices = replace(CTX, draft_tokens=7, draft_slots=n)
    plan, auto = make_plan(flash, machine("24"), choices), make_plan(flash, machine("24"), replace(CTX, draft_tokens=7))
    assert plan.draft_slots == min(n, 512) and plan.fits_vram
    assert (plan.slots > auto.slots) == (plan.draft_slots < auto.slots)
    (device,) = plan.devices
    assert 0 <= device.free_bytes - RESERVE_BYTES - device.decode_bytes < device.expert_bytes
    report = Report(flash, machine("24"), plan)
    assert report.environment["LLAMA_PHASE_DRAFT_SLOTS"] == str(n)
    assert ("(LLAMA_PHASE_DRAFT_SLOTS)" in "\n".join(lines(report))) == (n < 512)
    with pytest.raises(UsageError, match="79 slots are too few for the draft: 80 are needed"):
        make_plan(flash, machine("24"), replace(choices, draft_slots=79))
    tight = replace(choices, slots=auto.slots, draft_slots=512)
    assert not make_plan(flash, machine("24"), tight).fits_vram
    assert "LLAMA_PHASE_DRAFT_SLOTS=auto" in [change.what for change in changes(flash, machine("24"), tight)]


def test_a_draft_from_its_own_file_is_in_the_plan(flash: ModelFacts, tmp_path: Path) -> None:
    """The block's file beside a model whose own block is not used: as the block inside, and its head and table more."""
    path = write_flash_next(tmp_path, trunk=False)
    bare = replace(flash, layers=flash.layers[:-1])
    own = replace(bare, draft=read_facts(flash.path, path).draft)
    upstream = ["-md", str(path), "-cmoed"]
    choices = Choices.of(Settings.load(model=flash.path, ctx=32768, mtp="auto", upstream=upstream), own)
    assert choices.draft_tokens == 7
    inside, outside = (
        make_plan(flash, machine("48"), replace(CTX, draft_tokens=7)),
        make_plan(own, machine("48"), choices),
    )
    head = own.draft.output_bytes
    (one,), (other,) = inside.devices, outside.devices
    assert head > 0 and other.dense_bytes == one.dense_bytes + head
    for name in ("kv_bytes", "state_bytes", "ring_bytes", "expert_bytes", "moe_layers"):
        assert getattr(one, name) == getattr(other, name), name
    assert outside.pinned_bytes == inside.pinned_bytes
    assert outside.host_bytes == inside.host_bytes + own.draft.input_bytes
    words = Report(own, machine("48"), outside).serve_argv
    assert words[words.index("--mtp") + 1] == "auto" and words[words.index("-ngl") :].count("-cmoed") <= 1
    again = Settings.load(model=flash.path, ctx=32768, mtp="auto", upstream=words[words.index("--") + 1 :])
    assert Choices.of(again, own).draft_place.host_experts == choices.draft_place.host_experts > 0
    text = list(lines(Report(own, machine("48"), outside)))
    assert text[1].startswith("draft: flash (qwen4exp)") and "7 tokens at a time" in text[1]
    # K/V of its own type, on a GPU of its own
    upstream += ["-ctkd", "q8_0", "-ctvd", "q8_0", "-devd", "CUDA1"]
    elsewhere = Choices.of(Settings.load(model=flash.path, ctx=32768, mtp="auto", upstream=upstream), own)
    first, second = make_plan(own, machine("4,44"), elsewhere), make_plan(own, machine("44,4"), elsewhere)
    for plan in (first, second):
        without = make_plan(replace(bare, draft=None), machine("4,44" if plan is first else "44,4"), CTX)
        assert plan.devices[0].dense_bytes == without.devices[0].dense_bytes
        more = plan.devices[1].kv_bytes - without.devices[1].kv_bytes
        assert 0 < more < other.kv_bytes - make_plan(bare, machine("48"), CTX).devices[0].kv_bytes


def test_the_draft_is_planned_as_it_will_be_started(flash: ModelFacts) -> None:
    def tokens(*upstream: str, **flags: object) -> int:
        return Choices.of(Settings.load(model=flash.path, upstream=upstream, **flags), flash).draft_tokens

    assert (tokens(), tokens(mtp="auto"), tokens(mtp=2), tokens(mtp="auto", expert_batch=4)) == (0, 7, 2, 3)
    assert tokens("--spec-type", "draft-mtp") == 3 and tokens("--spec-type", "ngram-mod", mtp="auto") == 0
    assert tokens("--spec-draft-n-max", "5", mtp="auto") == tokens("--spec-draft-n-max", "5", spec="draft-mtp") == 5
    assert tokens("--spec-type", "draft-mtp", "--spec-type", "ngram-mod") == 3
    flash = replace(flash, architecture="glm4")  # whose block has no graph
    assert tokens(mtp="auto") == tokens("--spec-draft-n-max", "5", mtp="auto") == 0


def test_never_more_slots_than_experts(flash: ModelFacts) -> None:
    assert make_plan(flash, machine("640"), CTX).slots == 512
    assert make_plan(flash, machine("640"), replace(CTX, slots=9999)).slots == 512


def test_fewer_slots_than_the_engine_accepts_are_refused_with_the_number(flash: ModelFacts) -> None:
    with pytest.raises(UsageError, match="80 are needed"):
        make_plan(flash, machine("24"), replace(CTX, slots=79))
    assert make_plan(flash, machine("640"), replace(CTX, slots=40, expert_batch=4)).slots == 40


def test_layers_are_split_by_free_memory_and_all_are_somewhere(flash: ModelFacts) -> None:
    plan = make_plan(flash, machine("24,12"), CTX)
    # of 48 layers, an MTP layer and the output; boundary at 50 * 2/3
    assert [device.layers for device in plan.devices] == [34, 14]
    assert sum(device.experts_bytes for device in plan.devices) == flash.experts_bytes == plan.pinned_bytes
    dense = sum(layer.dense_bytes for layer in flash.served_layers) + flash.output_bytes
    assert sum(device.dense_bytes for device in plan.devices) == dense


def test_kv_grows_with_the_context_and_its_type_and_state_with_the_sequences(flash: ModelFacts) -> None:
    def sizes(**other: object) -> tuple[int, int]:
        device = make_plan(flash, machine("96"), replace(CTX, **other)).devices[0]
        return device.kv_bytes, device.state_bytes

    kv, state = sizes()
    assert kv == 12 * (512 + 512 + 256) * 2 * 32768
    assert sizes(ctx=65536) == (2 * kv, state)
    assert sizes(type_k="q8_0", type_v="q8_0") == (kv * 17 // 32, state)
    assert sizes(sequences=1) == (kv, state // 4)


def test_ring_shrinks_before_the_prefill_gives_up_and_slots_do_not_count_there(flash: ModelFacts) -> None:
    region = flash.layers[0].experts_bytes
    roomy = make_plan(flash, machine("24"), CTX)
    assert roomy.ring_regions == 3 and roomy.devices[0].ring_bytes == 3 * region
    device = roomy.devices[0]
    rest = device.fixed_bytes + device.prefill_compute_bytes
    for regions in (2, 0):
        capped = replace(CTX, budgets_mib=((device.prefill_compute_bytes + regions * region + region // 2) >> 20,))
        plan = make_plan(flash, machine("96"), replace(capped, expert_batch=1))
        assert plan.ring_regions == regions, "a single region overlaps nothing"
    tight = Machine(gpus=(Gpu(0, "", vram_free_bytes=rest + 2 * region),))
    assert make_plan(flash, tight, replace(CTX, expert_batch=1)).ring_regions == 2


def test_a_budget_caps_slots_and_compute_together(flash: ModelFacts) -> None:
    device = make_plan(flash, machine("96"), replace(CTX, budgets_mib=(16384,))).devices[0]
    taken = device.slots_bytes + device.decode_compute_bytes
    assert 16 * GIB - device.expert_bytes < taken <= 16 * GIB


def test_a_model_without_experts_gets_no_slots(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.context_length": 4096,
    }
    tensors = {"token_embd.weight": ((64, 100), F32), "blk.0.attn_k.weight": ((64, 64), F16)}
    facts = read_facts(write_sparse(tmp_path / "dense.gguf", metadata, tensors))
    report = Report(facts, machine("8"), make_plan(facts, machine("8"), CTX))
    assert report.plan.slots == report.plan.ring_regions == 0 and report.plan.fits
    assert "--cpu-moe" not in report.serve_argv and "--slots" not in report.serve_argv
    assert not any("hit" in line for line in lines(report))


@pytest.mark.parametrize("facts", [Machine(), Machine(gpus=(Gpu(0, "x"),)), Machine(unknown={"gpus": "no driver"})])
def test_no_gpu_or_one_of_unknown_memory_is_refused(flash: ModelFacts, facts: Machine) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(flash, facts, CTX)
    assert "--vram" in caught.value.fix and facts.unknown.get("gpus", "") in str(caught.value)


def test_more_slots_take_what_an_h200_measured(tmp_path: Path) -> None:
    """docs/performance.md: 64, 128, 256 slots took 4172, 5468, 8060 MiB. This model's dense weights are others."""
    path = write_flash_next(tmp_path, layers=24, n_embd=2048, n_ff=256)
    facts = read_facts(path)
    choices = Choices(ctx=16384, expert_batch=6, sequences=1)
    taken = [
        make_plan(facts, machine("139"), replace(choices, slots=n)).devices[0].decode_bytes for n in (64, 128, 256)
    ]
    assert [(more - taken[0]) >> 20 for more in taken[1:]] == [5468 - 4172, 8060 - 4172]


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_each_change_named_makes_it_fit_and_none_is_named_for_nothing(flash: ModelFacts) -> None:
    where = machine("24,24")
    wanted = replace(CTX, slots=400)
    plan = make_plan(flash, where, wanted)
    short = plan.devices[0].decode_short_bytes
    assert short == plan.devices[0].decode_bytes + RESERVE_BYTES - plan.devices[0].free_bytes > 0
    found = changes(flash, where, wanted)
    assert [change.what for change in found] == ["--slots auto", "--slots 0"]
    assert found[0].slots == make_plan(flash, where, CTX).slots
    assert changes(flash, where, CTX) == []


def test_several_changes_together_when_no_single_one_is_enough(flash: ModelFacts) -> None:
    choices = Choices(ctx=262144)
    found = changes(flash, machine("10"), choices)
    assert found and all(" and " in change.what for change in found)
    assert any("--ctx" in change.what for change in found)


def test_nothing_is_promised_when_nothing_is_enough(flash: ModelFacts) -> None:
    report = Report(flash, machine("1"), make_plan(flash, machine("1"), CTX))
    assert changes(flash, machine("1"), CTX) == []
    text = "\n".join(lines(report))
    assert "no setting is enough" in text and "command:" not in text


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    vram=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    ctx=st.sampled_from([4096, 100_000, 262_144]),
    slots=st.none() | st.sampled_from([0, 80, 300, 512]),
    ubatch=st.sampled_from([128, 512, 2048]),
    budgets=st.sampled_from([(), (4096,), (30000, 2000)]),
    draft=st.sampled_from([(0, None), (7, None), (7, 80), (7, 512)]),
)
def test_any_plan_is_consistent(
    flash: ModelFacts,
    vram: list[int],
    ctx: int,
    slots: int | None,
    ubatch: int,
    budgets: tuple[int, ...],
    draft: tuple[int, int | None],
) -> None:
    where = Machine(gpus=tuple(Gpu(i, "", vram_free_bytes=size * GIB) for i, size in enumerate(vram)))
    draft_tokens, draft_slots = draft
    choices = Choices(
        ctx=ctx, slots=slots, ubatch=ubatch, budgets_mib=budgets, draft_tokens=draft_tokens, draft_slots=draft_slots
    )
    plan = make_plan(flash, where, choices)
    for device in plan.devices:
        if plan.fits_vram:
            assert device.decode_bytes <= device.free_bytes and device.prefill_bytes <= device.free_bytes
        assert min(device.decode_short_bytes, device.prefill_short_bytes, device.ring_bytes) >= 0
    if plan.fits_vram and plan.slots:
        assert plan.slots_needed <= plan.slots <= plan.slots_fit
    assert plan.host_short_bytes is None, "unknown memory stays unknown"
    for change in changes(flash, where, choices):
        assert change.what
    assert json.loads(json.dumps(Report(flash, where, plan).as_dict()))["plan"]["fits_vram"] == plan.fits_vram


def test_host_memory_that_is_too_small_is_said_and_unknown_is_not_enough(flash: ModelFacts) -> None:
    def text(ram: str | None) -> tuple[Plan, str]:
        where = machine("24,24", ram=ram)
        report = Report(flash, where, make_plan(flash, where, CTX))
        return report.plan, "\n".join(lines(report))

    plan, said = text("32")
    assert plan.host_short_bytes == plan.host_bytes - 32 * GIB and not plan.fits and "host memory is" in said
    plan, said = text(None)
    assert plan.host_short_bytes is None and "RAM: unknown" in said
    assert "RAM: enough" in text("192")[1]


# --- PCIe -------------------------------------------------------------------------------------------------------------


def test_prompt_seconds_are_passes_over_the_experts(flash: ModelFacts) -> None:
    where = machine("24,24", pcie="3x16,4x8")
    report = Report(flash, where, make_plan(flash, where, CTX))
    per_pass = report.prompt_seconds(2048)
    assert per_pass and report.prompt_seconds(8192) == pytest.approx(4 * per_pass)
    assert report.prompt_seconds(600) == pytest.approx(2 * per_pass), "two small micro-batches, no switch"
    assert report.prompt_seconds(1000) == pytest.approx(per_pass), "a switch saves one"
    assert 4 < per_pass < 6  # 68 GB at 13 GB/s
    half = machine("24,24", pcie="3x8,4x4")
    assert Report(flash, half, report.plan).prompt_seconds(2048) == pytest.approx(2 * per_pass, rel=0.01)


def test_unknown_link_means_unknown_seconds(flash: ModelFacts) -> None:
    where = machine("24,24", pcie=None)
    report = Report(flash, where, make_plan(flash, where, CTX))
    assert report.prompt_seconds(2048) is None and report.missed_seconds_per_token(0.5) is None
    text = "\n".join(lines(report))
    assert "--pcie" in text and "MB per token missed" in text


def test_hit_rates_come_from_the_table_or_are_unknown(flash: ModelFacts) -> None:
    assert [hit_rate(n, 512) for n in HIT_RATES] == list(HIT_RATES.values()) == [0.59, 0.72, 0.82]
    assert 0.59 < hit_rate(100, 512) < 0.72
    assert hit_rate(63, 512) is None and hit_rate(300, 512) is None and hit_rate(128, 256) is None
    assert hit_rate(512, 512) == 1.0
    report = Report(flash, machine("24,24"), make_plan(flash, machine("24,24"), replace(CTX, slots=128)))
    expert = 48 * 3 * 2560 * 640 // 32 * 18
    assert report.missed_bytes_per_token(0.72) == pytest.approx(10 * expert * 0.28)
    assert "from a synthetic model" in "\n".join(lines(report))


def test_links() -> None:
    assert parse_link("3x16") == (3, 16) and link_bytes_per_s(3, 16) == pytest.approx(15.76e9)
    assert link_bytes_per_s(None, 16) is None and link_bytes_per_s(4, None) is None and link_bytes_per_s(9, 1) is None
    assert [passes(n, 2048) for n in (1, 2048, 2049, 8192)] == [1, 1, 2, 4]


# --- settings in, command out -----------------------------------------------------------------------------------------


def test_the_command_starts_what_was_planned(flash: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_PHASE_EXPERT_BATCH", "4")
    monkeypatch.setenv("LLAMA_PHASE_RING", "2")
    settings = Settings.load(model=flash.path, ctx=65536, prefill_ubatch=4096, upstream=["-ctk", "q8_0"])
    choices = Choices.of(settings, flash)
    assert (choices.slots, choices.expert_batch, choices.ring, choices.type_k) == (None, 4, 2, "q8_0")
    report = Report(flash, machine("24,24"), make_plan(flash, machine("24,24"), choices))
    for name, value in report.environment.items():
        monkeypatch.setenv(name, value)
    words = report.serve_argv
    ours, theirs = words[3 : words.index("--")], words[words.index("--") + 1 :]
    flags = dict(zip(ours[::2], ours[1::2], strict=True))
    names = {"--ctx": "ctx", "--slots": "expert_slots", "--prefill-ubatch": "prefill_ubatch"}
    again = Settings.load(model=words[2], upstream=theirs, **{names[flag]: value for flag, value in flags.items()})
    assert Choices.of(again, flash) == replace(choices, slots=report.plan.slots)
    assert {"--cpu-moe", "--no-repack"} <= set(argv(again))


def test_the_command_keeps_the_place_of_the_kv_and_all_flags(
    flash: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K/V in host memory leaves room for slots, so a command without it would not fit."""
    monkeypatch.setenv("LLAMA_PHASE_KV", "host")
    monkeypatch.setenv("LLAMA_PHASE_KV_ROWS", "8192")
    flags = ["-ngl", "99", "-cmoe", "-np", "2", "-fa", "on"]
    choices = Choices.of(Settings.load(model=flash.path, ctx=32768, upstream=flags), flash)
    report = Report(flash, machine("24"), make_plan(flash, machine("24"), choices))
    assert report.environment == {"LLAMA_PHASE_KV": "host", "LLAMA_PHASE_KV_ROWS": "8192"}
    assert report.serve_argv[report.serve_argv.index("--") + 1 :] == flags


@pytest.mark.parametrize(
    ("upstream", "reason"),
    [
        (["-ctk", "q8_0"], "only f16 K/V is read in place"),
        (["-fa", "off"], "without flash attention (-fa on)"),
        (["-fa", "on", "--flash-attn", "0"], "without flash attention (-fa on)"),
    ],
)
@pytest.mark.parametrize("kv", ["host", "host-all", "auto"])
def test_kv_that_cannot_be_read_in_place_stays_and_the_plan_says_why(
    flash: ModelFacts, monkeypatch: pytest.MonkeyPatch, upstream: list[str], reason: str, kv: str
) -> None:
    """In VRAM it counts; 10 GB are less than half of the 262144 tokens' K/V."""
    monkeypatch.setenv("LLAMA_PHASE_KV", kv)
    choices = Choices.of(Settings.load(model=flash.path, ctx=262144, upstream=upstream), flash)
    plan = make_plan(flash, machine("10"), choices)
    assert plan.devices[0].kv_host_bytes == plan.devices[0].kv_rows_bytes == 0
    stock = make_plan(flash, machine("10"), replace(choices, kv="device"))
    assert plan.devices[0].kv_bytes == stock.devices[0].kv_bytes
    said = [line for line in lines(Report(flash, machine("10"), plan)) if line.startswith("K/V stays on GPU 0: ")]
    assert len(said) == 1 and reason in said[0]
    works = Choices.of(Settings.load(model=flash.path, ctx=262144, upstream=["-fa", "auto"]), flash)
    assert make_plan(flash, machine("10"), works).devices[0].kv_host_bytes > 0


@pytest.fixture
def dense(tmp_path: Path) -> ModelFacts:
    """No indexer, 8 KiB of K/V a token."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.embedding_length": 1024,
        "llama.attention.head_count": 8,
        "llama.context_length": 131072,
    }
    tensors = {"token_embd.weight": ((1024, 100), F32)}
    tensors |= {f"blk.{layer}.attn_k.weight": ((1024, 1024), F16) for layer in range(2)}
    return read_facts(write_sparse(tmp_path / "dense.gguf", metadata, tensors))


def test_a_dense_model_keeps_its_kv_and_the_plan_says_what_it_would_cost(dense: ModelFacts) -> None:
    """1 GiB a token at 131072; several GPUs have a line each."""
    choices = Choices(ctx=131072, kv="host")
    plan = make_plan(dense, machine("8"), choices)
    assert plan.devices[0].kv_host_bytes == plan.devices[0].kv_rows_bytes == 0 and plan.devices[0].kv_bytes == GIB
    text = list(lines(Report(dense, machine("8"), plan)))
    assert [line for line in text if line.startswith("K/V")][1:] == [
        "K/V stays on GPU 0: dense attention would read 1024 MiB over the link for each token of a full context, at "
        "most 23.3 tok/s at 25 GB/s (LLAMA_PHASE_KV=host-all does it all the same)"
    ]
    text = list(lines(Report(dense, machine("4,10"), make_plan(dense, machine("4,10"), choices))))
    assert sum("would read 512 MiB" in line and "46.6 tok/s" in line for line in text) == 2
    assert make_plan(dense, machine("8"), replace(choices, kv="auto")).devices[0].kv_reasons == ()
    forced = make_plan(dense, machine("8"), replace(choices, kv="host-all")).devices[0]
    assert (forced.kv_host_bytes, forced.kv_rows, forced.kv_reasons) == (GIB, 0, ())
    other = make_plan(replace(dense, has_indexer=True), machine("8"), choices).devices[0]
    assert "of models with an indexer, only qwen4exp is known" in other.kv_reasons[0]


@pytest.mark.parametrize(("ubatch", "on_host", "on_device"), [(64, 5.5, 15.8), (128, 6.1, 15.9), (512, 8.8, 18.6)])
def test_vram_per_token_of_context_is_what_an_h200_measured(
    tmp_path: Path, ubatch: int, on_host: float, on_device: float
) -> None:
    """docs/performance.md, in KiB: flash-next-small with 6 attention layers, between 16k and 128k. Within 3 %."""
    facts = read_facts(write_flash_next(tmp_path, layers=24, n_embd=2048, n_ff=256))
    for kv, measured in (("host", on_host), ("device", on_device)):
        choices = Choices(ctx=16384, ubatch=ubatch, sequences=1, slots=0, kv=kv)
        report = Report(facts, machine("139"), make_plan(facts, machine("139"), choices))
        (size,) = report.vram_bytes_per_token
        assert size / 1024 == pytest.approx(measured, rel=0.03)
        assert f"VRAM per token of context, decode phase *: {size / 1024:.1f} KiB" in list(lines(report))
        assert report.as_dict()["vram_bytes_per_token"] == [size]


def test_vram_per_token_is_of_where_the_kv_is_now(flash: ModelFacts) -> None:
    """`auto` would move it at twice this context; there is a figure for each GPU."""
    auto = Choices(ctx=262144, kv="auto")
    reports = [
        Report(flash, machine("11,11"), make_plan(flash, machine("11,11"), replace(auto, kv=kv)))
        for kv in ("auto", "device", "host")
    ]
    here, device, host = (report.vram_bytes_per_token for report in reports)
    twice = make_plan(flash, machine("11,11"), replace(auto, ctx=524288))
    assert sum(d.kv_host_bytes for d in reports[0].plan.devices) == 0 < sum(d.kv_host_bytes for d in twice.devices)
    assert here == device and len(here) == 2 and sum(here) > sum(host)


@pytest.mark.parametrize("flag", ["--n-cpu-moe 20", "-ot exps=CPU", "-ngl 30"])
def test_flags_that_no_plan_is_for(flash: ModelFacts, flag: str) -> None:
    planned = Settings.load(model=flash.path, ctx=32768, upstream=["-ngl", "99", "--cpu-moe"])
    assert not_planned(planned, flash) == ""
    other = Settings.load(model=flash.path, ctx=32768, upstream=flag.split())
    assert flag.split()[-1 if flag.startswith("-ngl") else 0] in not_planned(other, flash)


def layers_of(flash: ModelFacts, vram: str, *upstream: str) -> dict[str, int]:
    """MoE layers by device, of a server with these flags; slots go where layers are."""
    settings = Settings.load(model=flash.path, ctx=32768, upstream=upstream)
    there = used_by(machine(vram), settings.upstream)
    devices = make_plan(flash, there, Choices.of(settings, flash)).devices
    assert all((device.slots_bytes > 0) == (device.moe_layers > 0) for device in devices)
    return {device.name: device.moe_layers for device in devices}


def test_the_gpus_and_shares_that_a_server_is_given(flash: ModelFacts) -> None:
    """As llama.cpp has it: --device chooses and orders, -ts counts by that order, all zeros mean free memory."""
    everywhere = layers_of(flash, "24,24")
    assert list(everywhere) == ["GPU 0", "GPU 1"] and min(everywhere.values()) > 20
    total = sum(everywhere.values())
    assert layers_of(flash, "1,24", "-dev", "CUDA1") == {"GPU 1": total}, "what is full and not used does not count"
    assert layers_of(flash, "24,24", "-dev", "CUDA1,CUDA0", "-ts", "1,0") == {"GPU 1": total, "GPU 0": 0}
    uneven = layers_of(flash, "24,24", "--tensor-split", "3/1")
    assert 3 < uneven["GPU 0"] / uneven["GPU 1"] < 4  # the head counts as a layer
    assert layers_of(flash, "24,24", "-ts", "0,0") == layers_of(flash, "24,24", "-ts", "1,1,5") == everywhere
    assert layers_of(flash, "24,24", "-sm", "layer") == everywhere


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("-dev none", "none"),
        ("-dev CUDA0,CUDA7", "CUDA7"),
        ("-dev Vulkan0", "Vulkan0"),
        ("-sm row", "row"),
        ("-sm none", "none"),
        ("-ts much", "much"),
        ("-ts -1,2", "-1,2"),
    ],
)
def test_gpus_and_splits_that_no_plan_is_for(flash: ModelFacts, flags: str, named: str) -> None:
    with pytest.raises(UsageError, match=f"no plan: .*{named}"):
        layers_of(flash, "24,24", *flags.split())
    settings = Settings.load(model=flash.path, upstream=["-ngl", "99", "-cmoe", *flags.split()])
    assert plan_of(settings, machine("24,24"))[0] is None


def test_prefill_ubatch_auto_is_the_largest_that_fits(flash: ModelFacts) -> None:
    """More memory, a larger one; the plan with it fits; each candidate's need and shortfall is said."""
    settings = Settings.load(model=flash.path, ctx=32768, prefill_ubatch="auto")
    chosen = []
    for vram in ("5", "6", "8", "10", "12", "80"):
        there = machine(vram)
        plan = make_plan(flash, there, Choices.of(settings, flash))
        assert [one.ubatch for one in plan.candidates] == [1024, 2048, 4096, 8192]
        fitting = [one.ubatch for one in plan.candidates if one.fits]
        assert plan.choices.switches == bool(fitting)
        assert plan.choices.prefill_ubatch == max(fitting, default=512)
        assert not any(device.prefill_short_bytes for device in plan.devices)
        text = "\n".join(lines(Report(flash, there, plan)))
        assert all(f"prefill ubatch {one.ubatch}: GPU 0 " in text for one in plan.candidates)
        assert ("short by" in text) == (len(fitting) < 4)
        assert "--prefill-ubatch auto" in shlex.join(Report(flash, there, plan).serve_argv)
        chosen.append(plan.choices.prefill_ubatch)
    assert chosen == sorted(chosen) and chosen[0] < chosen[-1] == 8192


def test_chunks_let_a_larger_micro_batch_fit(flash: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """With LLAMA_PHASE_CHUNK=auto, and before that what it would be, for each candidate; the command keeps it."""
    sizes = {"model": flash.path, "ctx": 131072, "prefill_ubatch": "auto"}
    there = machine("14")
    whole = make_plan(flash, there, Choices.of(Settings.load(**sizes), flash))
    monkeypatch.setenv("LLAMA_PHASE_CHUNK", "auto")
    chunked = make_plan(flash, there, Choices.of(Settings.load(**sizes), flash))
    assert chunked.choices.prefill_ubatch > whole.choices.prefill_ubatch
    for a, b in zip(whole.candidates, chunked.candidates, strict=True):
        assert a.needs[0].in_chunks_bytes == b.needs[0].compute_bytes <= a.needs[0].compute_bytes
    # planned by the engine for this shape: 9387 and 2362 MiB
    assert 0.85 < whole.candidates[-1].needs[0].compute_bytes / (9387 << 20) < 1.15
    assert 0.85 < chunked.candidates[-1].needs[0].compute_bytes / (2362 << 20) < 1.15
    report = Report(flash, there, chunked)
    assert report.environment["LLAMA_PHASE_CHUNK"] == "auto"
    assert "with LLAMA_PHASE_CHUNK=auto" in "\n".join(lines(Report(flash, there, whole)))
    assert not any("with LLAMA_PHASE_CHUNK" in line for line in lines(report))


def test_prefill_ubatch_auto_is_capped_by_batch_and_context(flash: ModelFacts) -> None:
    for limits, last in (({"batch": 3000}, 3000), ({"ctx": 4096}, 4096), ({"batch": 512}, None)):
        settings = Settings.load(model=flash.path, prefill_ubatch="auto", **({"ctx": 32768} | limits))
        plan = make_plan(flash, machine("80"), Choices.of(settings, flash))
        assert (plan.candidates[-1].ubatch if plan.candidates else None) == last


def test_slots_of_the_environment_are_a_choice(flash: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_PHASE_EXPERT_SLOTS", "0")
    assert Choices.of(Settings.load(model=flash.path), flash).slots == 0


@pytest.mark.parametrize("upstream", [["-ctk", "q9"], ["--cache-type-v", "nothing"]])
def test_an_unknown_kv_type_is_refused(flash: ModelFacts, upstream: list[str]) -> None:
    with pytest.raises(UsageError, match="K/V type"):
        Choices.of(Settings.load(model=flash.path, upstream=upstream), flash)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "llama_phase.cli", *words], capture_output=True, text=True, timeout=60
        )

    return run


def test_plan_command(flash: ModelFacts, command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    where = ("--vram", "24,24", "--ram", "192", "--pcie", "3x16")
    done = command("plan", str(flash.path), *where, "--ctx", "32768")
    assert done.returncode == 0 and "GPU 1 prefill" in done.stdout and "* an estimate" in done.stdout, done.stderr
    line = done.stdout.splitlines()[-1]
    assert shlex.split(line)[:3] == ["llama-phase", "serve", str(flash.path)]
    done = command("plan", str(flash.path), *where, "--slots", "500", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["changes"][0]["what"] == "--slots auto"
    done = command("plan", str(flash.path), "--vram", "24", "--slots", "7")
    assert done.returncode == 2 and "error: 7 slots" in done.stderr and "fix: " in done.stderr
    done = command("plan", str(flash.path.with_name("none.gguf")), *where)
    assert done.returncode == 7 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("layers", "depth"), [((), 3), ((48,), 3), ((48, 0), 3), ((24, 24), 13), ((4, 4), 3), ((16, 16, 16), 12)]
)
def test_links_of_several_devices_are_kept_busy(layers: tuple[int, ...], depth: int) -> None:
    assert ring_depth(layers) == depth


def test_a_ring_for_several_devices_leaves_a_reserve(flash: ModelFacts) -> None:
    """Two cards of 80 GB have the depth that their links want, of 20 GB what is left, one card three layers."""
    depths = [
        make_plan(flash, machine(vram), replace(CTX, slots=128)).ring_regions for vram in ("80,80", "20,20", "80")
    ]
    assert 13 <= depths[0] <= 14 and 3 <= depths[1] < 13 and depths[2] == 3
    for device in make_plan(flash, machine("20,20"), replace(CTX, slots=128)).devices:
        taken = device.fixed_bytes + device.prefill_compute_bytes + device.ring_bytes
        assert taken + RESERVE_BYTES <= device.free_bytes


# --- against the engine -----------------------------------------------------------------------------------------------


def test_constants_are_those_of_the_engine() -> None:
    source = "".join(path.read_text() for path in (ROOT / "engine").glob("*.[ch]*") if path.is_file())
    assert {int(mib) << 20 for mib in re.findall(r"RESERVE_BYTES = size_t\((\d+)\) << 20;", source)} == {RESERVE_BYTES}
    (regions,) = re.findall(r"RING_REGIONS_LEAST = (\d+);", source)
    (floor,) = re.findall(r"MIN_TOKENS_FLOOR = (\d+);", source)
    (ubatches,) = re.findall(r"uint32_t ubatch : \{ ([\du, ]+) \}", source)
    (link,) = re.findall(r"PHASE_LINK_BYTES_PER_S = ([\de]+);", source)
    assert float(link) == plan_kv.LINK_BYTES_PER_S
    assert (int(regions), int(floor)) == (RING_LEAST, MIN_TOKENS_FLOOR)
    assert tuple(int(n.strip(" u")) for n in ubatches.split(",")) == UBATCHES


@pytest.mark.engine
@pytest.mark.parametrize("name", ["qwen4exp", "qwen35moe", "qwen3moe"])
def test_kv_and_state_are_what_the_engine_allocates(name: str, fleet: Fleet, model_path: Callable[[str], Path]) -> None:
    server = fleet.fresh(name, "-c", "8192", "-np", "4", "-lv", "4", binary=STOCK_BIN, env={})
    server.stop()
    sizes = {"kv_cache": 0.0, "memory_recurrent": 0.0}
    for kind, mib in re.findall(r"llama_(kv_cache|memory_recurrent): size = +([\d.]+) MiB", server.log_text()):
        sizes[kind] += float(mib)
    facts = read_facts(model_path(name))
    device = make_plan(facts, machine("24"), Choices(ctx=8192)).devices[0]
    assert device.kv_bytes / 2**20 == pytest.approx(sizes["kv_cache"], abs=0.02)
    assert device.state_bytes / 2**20 == pytest.approx(sizes["memory_recurrent"], abs=0.02)
    assert sizes["kv_cache"]


def test_a_larger_prefill_micro_batch_that_fits_is_offered_with_what_it_wins(flash: ModelFacts) -> None:
    """Beside as many slots: a prompt of 8192 is then one pass over the experts, not four."""
    plan = make_plan(flash, machine("24,24"), CTX)
    report = Report(flash, machine("24,24"), plan)
    larger = report.of_larger_ubatch
    assert larger is not None and larger.plan.fits and larger.plan.slots >= plan.slots
    assert larger.plan.choices.prefill_ubatch == 8192
    before, after = (one.prompts() for one in (report, larger))
    assert after[8192] == pytest.approx(before[8192] / 4) and after[2048] == before[2048]
    text = "\n".join(lines(report))
    assert f"  with --prefill-ubatch 8192, which fits: {after[2048]:.1f} s for 2048 tokens, " in text
    assert report.as_dict()["pcie"]["larger_prefill_ubatch"]["ubatch"] == 8192
    for choices in (
        replace(CTX, ctx=2048),
        replace(CTX, prefill_ubatch=8192),
        replace(CTX, prefill_auto=True, batch=8192),
        replace(CTX, switches=False),
    ):
        same = Report(flash, machine("24,24"), make_plan(flash, machine("24,24"), choices))
        assert same.of_larger_ubatch is None and "which fits" not in "\n".join(lines(same))
        assert same.as_dict()["pcie"]["larger_prefill_ubatch"] is None


@pytest.mark.parametrize(("vram", "offered"), [("16,16", 8192), ("12,12", 4096), ("11,11", None)])
def test_the_larger_micro_batch_that_is_offered_fits(flash: ModelFacts, vram: str, offered: int | None) -> None:
    """Its compute buffers grow with the context; a plan that does not fit has other fixes."""
    plan = make_plan(flash, machine(vram), replace(CTX, ctx=131072))
    larger = Report(flash, machine(vram), plan).of_larger_ubatch
    assert (larger and larger.plan.choices.prefill_ubatch) == offered
    if larger:
        doubled = replace(larger.plan.choices, prefill_ubatch=2 * offered)
        assert offered == 8192 or not make_plan(flash, machine(vram), doubled).fits
