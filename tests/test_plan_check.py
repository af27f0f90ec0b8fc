"""Plans are compared with what the engine reports, and drawn as what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from engine_server import PREFILL_UBATCH, assert_same_but_for_ties
from expert_servers import TRANSACTION, ExpertFleet, stopped_at_the_end
from sparse_gguf import write_flash_next
from synth_gguf import make_model

from llama_phase import plan_check, plan_plot, plan_text
from llama_phase.errors import MissingPrerequisite, UsageError
from llama_phase.gguf_facts import ModelFacts, read_facts
from llama_phase.given_machine import with_given
from llama_phase.hardware import Machine
from llama_phase.plan import Plan, make_plan, plan_server
from llama_phase.plan_check import Deviation, compare, summary
from llama_phase.plan_choices import Choices
from llama_phase.plan_companion import PlanCheck
from llama_phase.plan_report import Report
from llama_phase.server import Server
from llama_phase.settings import Settings

MACHINE = with_given(Machine(), vram="24,20", ram="192")
FLASH_EXPERT_BYTES = 3 * 2560 * 640 // 32 * 18


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return read_facts(write_flash_next(tmp_path_factory.mktemp("flash")))


@pytest.fixture
def plan(flash: ModelFacts) -> Plan:
    return make_plan(flash, MACHINE, Choices(ctx=32768))


def reported(plan: Plan, **changes: int) -> dict:
    """/phase of an engine that does what was planned, but for `changes`, after a transaction; the last layer with
    experts is the draft's when there is one."""
    values = {
        "slots_per_layer": plan.slots,
        "slot_bytes": sum(device.slots_bytes for device in plan.devices),
        "pinned_bytes": plan.pinned_bytes,
    } | {name: value for name, value in changes.items() if name != "compute"}
    memory = {"decode": [], "prefill": []}
    for index in (1, 0):  # in no order
        device = plan.devices[index]
        for phase, compute, total in (
            ("decode", device.decode_compute_bytes, device.decode_bytes),
            ("prefill", device.prefill_compute_bytes, device.prefill_bytes),
        ):
            more = changes.get("compute", 0) if (index, phase) == (0, "prefill") else 0
            free = device.free_bytes - total - more
            memory[phase].append({"device": f"CUDA{index}", "compute_buffer_bytes": compute + more, "free_bytes": free})
    memory["decode"].append({"device": "CPU", "compute_buffer_bytes": 7})
    ring = sum(device.ring_bytes for device in plan.devices)
    steps = [{"step": "enter.quiesce", "bytes": 0}, {"step": "enter.allocate_ring", "bytes": ring}]
    layers = [{}] * sum(device.moe_layers for device in plan.devices)
    contexts = [values | {"layers": layers}]
    if plan.choices.draft_tokens:
        own = plan.draft_slots * FLASH_EXPERT_BYTES
        contexts[0] |= {"slot_bytes": values["slot_bytes"] - own, "layers": layers[1:]}
        contexts.append({"slots_per_layer": plan.draft_slots, "slot_bytes": own, "pinned_bytes": 0, "layers": [{}]})
    host = [
        {"device": f"CUDA{i}", "place": "host", "bytes": d.kv_host_bytes, "rows": {"kept": d.kv_rows}}
        for i, d in enumerate(plan.devices)
        if d.kv_host_bytes
    ]
    kv = {"contexts": [{"layers": host}]}
    return {"experts": contexts, "memory": memory, "last_enter_steps": steps, "kv": kv}


def test_an_engine_that_does_what_was_planned_deviates_nowhere(plan: Plan) -> None:
    props = {"default_generation_settings": {"n_ctx": 32768}}
    found = compare(plan, reported(plan), props)
    assert {deviation.error for deviation in found} == {0.0} and summary(found) == ""
    items = " ".join(deviation.item for deviation in found)
    for part in ("slots per layer", "pinned", "ring", "GPU 0 (CUDA0), decode", "GPU 1 (CUDA1), prefill", "context"):
        assert part in items, part


@pytest.mark.parametrize("kv", ["device", "host"])
def test_contexts_are_compared_together_and_experts_with_experts(flash: ModelFacts, kv: str) -> None:
    """With an MTP draft its slots count; with K/V in host memory, what is pinned of it does not."""
    plan = make_plan(flash, MACHINE, Choices(ctx=32768, draft_tokens=7, kv=kv))
    phase = reported(plan)
    for experts in phase["experts"]:
        experts["pinned_bytes"] = 0
    phase["experts"][0]["pinned_bytes"] = 49 * 512 * FLASH_EXPERT_BYTES
    found = compare(plan, phase)
    assert [d for d in found if d.error] == []
    assert {"K/V in host memory", "kept of host K/V"} & {d.item for d in found} == (
        {"K/V in host memory", "kept of host K/V"} if kv == "host" else set()
    )


def test_kv_that_is_elsewhere_than_planned_is_named(flash: ModelFacts) -> None:
    """A CPU engine keeps no positions of its own accord, a GPU that has little memory free neither."""
    plan = make_plan(flash, MACHINE, Choices(ctx=32768, kv="host"))
    phase = reported(plan, pinned_bytes=flash.experts_bytes)
    (layers,) = (context["layers"] for context in phase["kv"]["contexts"])
    for layer in layers:
        del layer["rows"]
    said = [str(d) for d in compare(plan, phase) if d.is_notable]
    assert said == [f"kept of host K/V: {12 * 32768} positions planned, 0 positions reported"]
    for layer in layers:
        layer["device"] = "CPU"
    assert [d for d in compare(plan, phase) if d.is_notable] == []
    layers.clear()
    said = [str(d) for d in compare(plan, phase) if d.is_notable]
    assert said == ["K/V in host memory: 768 MiB planned, 0 MiB reported"]


def test_an_mtp_draft_streams_nothing_so_its_layer_takes_no_place_in_the_ring(tmp_path: Path) -> None:
    """Of four layers and the block's, with a ring of eight: there are four regions."""
    facts = read_facts(write_flash_next(tmp_path, layers=4))
    one = with_given(Machine(), vram="48", ram="192")
    plan, with_draft = (make_plan(facts, one, Choices(ctx=4096, ring=8, draft_tokens=n)) for n in (0, 7))
    for name in ("ring_bytes", "streamed_bytes"):
        sizes = {getattr(each.devices[0], name) for each in (plan, with_draft)}
        assert sizes == {4 * 512 * FLASH_EXPERT_BYTES}, name


def test_each_figure_that_is_off_is_named_with_both_values(plan: Plan) -> None:
    found = compare(plan, reported(plan, slots_per_layer=plan.slots // 2, compute=4 << 30))
    said = [line[2:] for line in plan_check.lines(found) if line.startswith("!")]
    assert len(said) == 3, said
    assert f"slots per layer: {plan.slots} slots planned, {plan.slots // 2} slots reported" in said[0]
    assert all("GPU 0 (CUDA0), prefill phase" in text and "MiB planned" in text and "(-" in text for text in said[1:])
    assert summary(found).startswith(f"the plan is off in 3 of {len(found)} figures, most in slots per layer: ")


def test_estimates_may_be_off_by_more_than_what_is_computed() -> None:
    assert Deviation("x", 110, 100).is_notable and not Deviation("x", 110, 100, estimate=True).is_notable
    assert Deviation("x", 130, 100, estimate=True).is_notable
    assert Deviation("x", 1, 0).error is None and Deviation("x", 1, 0).is_notable
    assert not Deviation("x", 0, 0).is_notable


def test_what_was_not_reported_is_not_compared(plan: Plan) -> None:
    phase = reported(plan)
    phase["memory"]["prefill"], phase["last_enter_steps"] = [], []
    items = [deviation.item for deviation in compare(plan, phase)]
    assert not [item for item in items if "prefill" in item or "ring" in item or item == "context"]
    (only,) = compare(plan, {"mode": "off"})
    assert str(only) == f"slots per layer: {plan.slots} slots planned, 0 slots reported"


def test_what_was_compared_is_kept(plan: Plan, tmp_path: Path) -> None:
    assert plan_check.read(tmp_path) is None
    found = compare(plan, reported(plan, compute=1 << 30))
    plan_check.save(tmp_path, found, model="m.gguf", engine="e")
    assert plan_check.read(tmp_path) == ("m.gguf", found)
    (tmp_path / plan_check.FILE_NAME).write_text("{")
    assert plan_check.read(tmp_path) is None
    assert len(list(plan_check.lines(found))) == len(found)


def test_a_server_gets_a_plan_when_plans_apply_to_it(flash: ModelFacts, tmp_path: Path) -> None:
    def load(*upstream: str, **settings: object) -> Settings:
        return Settings.load(**{"model": flash.path, "ctx": 32768, "upstream": upstream} | settings)

    planned, why = plan_check.plan_of(load("-ngl", "99", "--cpu-moe", expert_slots=100), MACHINE)
    assert planned is not None and (planned.slots, why) == (100, "")
    planned, _ = plan_check.plan_of(load("-ngl", "99", "-cmoe"), MACHINE)
    assert planned is not None and planned.slots == 0, "without a choice `serve` uses no slots"
    for settings, machine in (
        (load("-ngl", "99"), MACHINE),
        (load("--cpu-moe"), MACHINE),
        (load("-ngl", "99", "--cpu-moe"), Machine()),
        (load("-ngl", "99", "--cpu-moe", expert_slots=1), MACHINE),
        (load("-ngl", "99", "--cpu-moe", model=tmp_path / "none.gguf"), MACHINE),
    ):
        planned, why = plan_check.plan_of(settings, machine)
        assert planned is None and why


def companion(folder: Path, said: list[str], vram: str, **settings: object) -> tuple[PlanCheck, Settings]:
    given = {"upstream": ["-ngl", "99", "--cpu-moe"]} | settings
    return PlanCheck(folder, said.append, machine=with_given(Machine(), vram=vram, ram="192")), Settings.load(**given)


def test_l6_what_cannot_fit_is_refused_before_loading_with_the_shortfall_of_each_device(
    flash: ModelFacts, tmp_path: Path
) -> None:
    check, settings = companion(tmp_path, [], "24,20", model=flash.path, ctx=32768, expert_slots=500)
    with pytest.raises(UsageError) as caught:
        check.starting(settings)
    assert "GPU 1 is" in str(caught.value) and "GiB short for weights, K/V and 500 slots" in str(caught.value)
    assert "llama-phase plan" in caught.value.fix
    drafting = {"model": flash.path, "ctx": 32768, "expert_slots": "auto", "mtp": "auto", "draft_slots": 500}
    check, settings = companion(tmp_path, [], "6", **drafting)
    with pytest.raises(UsageError, match=r"GPU 0 is .* GiB short for weights, K/V and 500 slots of the draft"):
        check.starting(settings)
    check, settings = companion(tmp_path, [], "1,1", model=flash.path, ctx=32768)
    with pytest.raises(UsageError, match=r"GPU 0 is .* GPU 1 is"):
        check.starting(settings)


def test_l6_a_draft_from_its_own_file_counts_and_where_its_experts_are_decides(
    flash: ModelFacts, tmp_path: Path
) -> None:
    """Without -cmoed all its weights go to the GPU, 1.4 GB of experts: `certain` has no room for those."""
    draft = write_flash_next(tmp_path, trunk=False)
    slots = {"model": flash.path, "ctx": 4096, "expert_slots": 80, "draft_slots": 80, "mtp": "auto"}
    one = with_given(Machine(), vram="48", ram="192")
    base = ("-ngl", "99", "--cpu-moe")
    planned, _ = plan_check.plan_of(Settings.load(**slots, upstream=[*base, "-md", str(draft), "-cmoed"]), one)
    (gpu,) = planned.devices
    certain = gpu.dense_bytes + gpu.kv_bytes + gpu.state_bytes + gpu.slots_bytes
    vram = f"{certain / (1 << 30) + 0.05:.3f}"
    for more in (("-cmoed",), ("-ncmoed", "49"), ("-ngld", "0"), ("--spec-draft-device", "none")):
        check, settings = companion(tmp_path, [], vram, **slots, upstream=[*base, "-md", str(draft), *more])
        check.starting(settings)
    for more in ((), ("-ngld", "99"), ("--spec-draft-device", "CUDA0")):
        check, settings = companion(tmp_path, [], vram, **slots, upstream=[*base, "-md", str(draft), *more])
        with pytest.raises(UsageError, match="GiB short for weights, K/V and 80 slots"):
            check.starting(settings)
    for more in (("-ngld", "1"), ("-otd", "exps=CPU")):
        settings = Settings.load(**slots, upstream=[*base, "-md", str(draft), *more])
        assert plan_check.plan_of(settings, one)[0] is None
    settings = Settings.load(**slots, upstream=[*base, "-hfd", "someone/draft"])
    assert "download" in plan_check.plan_of(settings, one)[1]


def test_slots_that_are_auto_become_a_number_beside_a_draft_that_is_loaded_after_them(
    flash: ModelFacts, tmp_path: Path
) -> None:
    """Its 1.4 GB on the GPU, or its slots, unless all of the target's fit."""
    draft = str(write_flash_next(tmp_path, trunk=False))
    given = {"model": flash.path, "ctx": 4096, "expert_slots": "auto", "mtp": "auto"}
    flags = ["-ngl", "99", "--cpu-moe", "-md", draft]
    said: list[str] = []
    check, settings = companion(tmp_path, [], "24", **given, upstream=[*flags, "-cmoed"])
    check.starting(settings)
    of_slots = check.resolved(settings).expert_slots
    check, settings = companion(tmp_path, said, "24", **given, upstream=flags)
    check.starting(settings)
    n = check.resolved(settings).expert_slots
    assert check.resolved(settings) == settings.model_copy(update={"expert_slots": n}) and 80 <= of_slots < 512
    assert said == [f"slots: {n}, so that the draft from {Path(draft).name} fits"]
    facts = read_facts(flash.path, draft)
    one = with_given(Machine(), vram="24", ram="192")
    plan = make_plan(facts, one, Choices.of(settings, facts))
    assert plan.slots == n and not any(device.decode_short_bytes for device in plan.devices)
    assert said[0].split(", ")[1] in "\n".join(plan_text.lines(Report(facts, one, plan)))
    assert not make_plan(facts, one, replace(plan.choices, slots=n + 1)).fits_vram

    # a restart has the same, whatever is free by then, and says it again; other settings are planned anew
    check._machine = with_given(Machine(), vram="20", ram="192")
    check.starting(settings.model_copy(update={"port": 9}))
    assert check.resolved(settings).expert_slots == n and said == said[:1] * 2
    other = settings.model_copy(update={"ctx": 8192})
    check.starting(other)
    assert 80 <= check.resolved(other).expert_slots < n

    for vram, changes in (
        ("24", {"expert_slots": n}),
        ("24", {"upstream": [*flags, "-ngld", "0"]}),
        ("24", {"upstream": flags[:3]}),
        ("640", {}),
    ):
        check, settings = companion(tmp_path, said, vram, **given | {"upstream": flags} | changes)
        check.starting(settings)
        assert check.resolved(settings) is settings and len(said) == 3


def test_a_late_draft_goes_to_the_gpu_that_has_room(flash: ModelFacts, tmp_path: Path) -> None:
    """llama.cpp puts its one layer where the head is, on the last GPU; here that is the small one."""
    draft = str(write_flash_next(tmp_path, trunk=False))
    flags = ["-ngl", "99", "--cpu-moe", "-md", draft]
    given = {"model": flash.path, "ctx": 4096, "expert_slots": "auto", "mtp": "auto"}
    two = with_given(Machine(), vram="24,12", ram="192")
    facts = read_facts(flash.path, draft)

    said: list[str] = []
    check, settings = companion(tmp_path, said, "24,12", **given, upstream=flags)
    check.starting(settings)
    resolved = check.resolved(settings)
    assert resolved.draft_device == "CUDA0" and f"{Path(draft).name} goes to CUDA0" in said[-1]
    slots = {}
    for device in ("", "CUDA0", "CUDA1"):
        those = settings.model_copy(update={"draft_device": device})
        slots[device] = make_plan(facts, two, Choices.of(those, facts)).slots
    assert resolved.expert_slots == slots["CUDA0"] > slots["CUDA1"] == slots[""]

    planned = plan_server(facts, two, Choices.of(settings, facts))
    report = Report(facts, two, planned)
    assert planned.slots == slots["CUDA0"] and report.serve_argv[-2:] == ["--spec-draft-device", "CUDA0"]
    assert "`serve` puts the draft on CUDA0" in "\n".join(plan_text.lines(report))

    for vram, more in (
        ("24,12", ["-devd", "CUDA1"]),  # somebody chose
        ("24,12", ["-ngld", "0"]),
        ("640,320", []),  # it fits wherever it is
        ("24", []),
        ("1,24", ["-dev", "CUDA1"]),
    ):
        check, settings = companion(tmp_path, said, vram, **given, upstream=[*flags, *more])
        check.starting(settings)
        assert check.resolved(settings).draft_device == ""


def test_a_late_draft_whose_gpu_the_model_is_not_on_has_no_plan(flash: ModelFacts, tmp_path: Path) -> None:
    draft = str(write_flash_next(tmp_path, trunk=False))
    flags = ["-ngl", "99", "--cpu-moe", "-md", draft, "-dev", "CUDA1", "-devd"]
    two = with_given(Machine(), vram="24,24", ram="192")
    for device, why in (("CUDA0", "the draft is on GPU 0, the model is not"), ("CUDA1", "")):
        settings = Settings.load(model=flash.path, ctx=4096, mtp="auto", upstream=[*flags, device])
        plan, reason = plan_check.plan_of(settings, two)
        assert why in reason and (plan is None) == bool(why)


def test_a_late_draft_beside_which_the_fewest_slots_do_not_fit_is_refused(flash: ModelFacts, tmp_path: Path) -> None:
    draft = str(write_flash_next(tmp_path, trunk=False))
    given = {"model": flash.path, "ctx": 4096, "expert_slots": "auto", "mtp": "auto"}
    flags = ["-ngl", "99", "--cpu-moe", "-md", draft]
    settings = Settings.load(**given, upstream=flags)
    plan, _ = plan_check.plan_of(settings.model_copy(update={"expert_slots": 80}), with_given(Machine(), vram="48"))
    (gpu,) = plan.devices
    certain = gpu.dense_bytes + gpu.kv_bytes + gpu.state_bytes + gpu.slots_bytes
    said: list[str] = []
    check, settings = companion(tmp_path, said, f"{certain / (1 << 30) - 0.05:.3f}", **given, upstream=flags)
    for _ in range(2):
        with pytest.raises(UsageError, match="GiB short for weights, K/V and 80 slots, the fewest"):
            check.starting(settings)
    assert said == []
    check, settings = companion(tmp_path, said, f"{certain / (1 << 30) + 0.05:.3f}", **given, upstream=flags)
    check.starting(settings)
    assert check.resolved(settings).expert_slots == 80, "an estimate refuses nothing"


def test_l17_an_estimate_refuses_nothing_and_there_is_a_way_to_force(flash: ModelFacts, tmp_path: Path) -> None:
    fixed = make_plan(flash, MACHINE, Choices(ctx=32768, slots=0)).devices
    certain = max(d.dense_bytes + d.kv_bytes + d.state_bytes for d in fixed) / (1 << 30)
    tight = f"{certain + 0.1:.2f},{certain + 0.1:.2f}"  # the compute buffers do not fit, as far as one knows
    assert not make_plan(flash, with_given(Machine(), vram=tight), Choices(ctx=32768, slots=0)).fits_vram
    check, settings = companion(tmp_path, [], tight, model=flash.path, ctx=32768)
    check.starting(settings)
    check, settings = companion(tmp_path, [], "1", model=flash.path, ctx=32768, check_plan=False)
    check.starting(settings)


def test_a_restart_is_not_refused_while_the_memory_of_the_dead_is_not_free_yet(
    flash: ModelFacts, tmp_path: Path
) -> None:
    check, settings = companion(tmp_path, [], "24,20", model=flash.path, ctx=32768)
    check.starting(settings)
    check._machine = with_given(Machine(), vram="1,1")
    check.starting(settings)
    with pytest.raises(UsageError):
        check.starting(settings.model_copy(update={"ctx": 16384}))


@pytest.mark.engine
def test_what_is_computed_agrees_with_the_real_engine(one_server, prompt, model_path, tmp_path: Path) -> None:
    """Slots, ring and what is pinned, to the byte; a CPU engine has no VRAM to compare."""
    facts = read_facts(model_path("qwen3moe"))
    choices = Choices(ctx=4096, slots=24, expert_batch=4)
    plan = make_plan(facts, with_given(Machine(), vram="24", ram="192"), choices)
    server = one_server("qwen3moe", "--no-repack", EXPERT_SLOTS="24", EXPERT_BATCH="4")
    server.complete(prompt("qwen3moe", 600), n=4)
    found = {deviation.item: deviation for deviation in compare(plan, server.phase(), server.http.get("/props").json())}
    assert set(found) == {"slots per layer", "slots", "pinned host memory", "layers with slots", "ring", "context"}
    assert {item: deviation.error for item, deviation in found.items() if deviation.error} == {}
    said: list[str] = []
    # served with other slots than planned, and on another device
    check, settings = companion(tmp_path, said, "24", model=facts.path, ctx=4096, expert_slots=64, port=server.port)
    check.starting(settings)
    check.ready(Server(settings))
    check._checking.join(30)
    assert len(said) == 1 and "most in slots per layer: 32 slots planned, 24 slots reported" in said[0], said
    assert plan_check.find(tmp_path.parent, facts.path) == []
    assert len(plan_check.find(tmp_path, facts.path)) == len(found)


@pytest.mark.engine
@pytest.mark.parametrize("draft", [(), ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3")])
@pytest.mark.parametrize("rows", ["300", "auto"])
def test_kv_in_host_memory_agrees_with_the_real_engine(one_server, model_path, rows: str, draft) -> None:
    """To the byte, and positions kept to the one; a CPU engine keeps none unless it is given a number."""
    given = {"ctx": 8192, "kv": "host", "kv_rows": rows, "expert_slots": 24, "expert_batch": 4}
    settings = Settings.load(model=model_path("qwen4exp"), upstream=["-ngl", "99", "--cpu-moe", *draft], **given)
    plan, why = plan_check.plan_of(settings, with_given(Machine(), vram="24", ram="192"))
    assert plan is not None, why
    environment = {"KV": "host", "KV_ROWS": rows, "EXPERT_SLOTS": "24", "EXPERT_BATCH": "4"}
    server = one_server("qwen4exp", "--no-repack", *draft, sizes={"ctx": 8192}, **environment)
    found = {deviation.item: deviation for deviation in compare(plan, server.phase())}
    assert found["K/V in host memory"].reported > 0
    assert ("kept of host K/V" in found) == (rows == "300")
    assert {item: deviation.error for item, deviation in found.items() if deviation.error} == {}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "flags"),
    [("qwen3moe", []), ("qwen4exp", ["-ctk", "q8_0"]), ("qwen4exp", ["-fa", "off"]), ("qwen35moe", [])],
)
def test_kv_stays_for_the_reason_that_the_plan_gave(one_server, model_path, model: str, flags: list[str]) -> None:
    """Word for word, what a dense model would read included; the plan names the speed of the link as well."""
    settings = Settings.load(model=model_path(model), ctx=8192, kv="host", upstream=flags)
    facts = read_facts(settings.model)
    plan = make_plan(facts, with_given(Machine(), vram="24"), Choices.of(settings, facts))
    layers = one_server(model, *flags, sizes={"ctx": 8192}, KV="host").phase()["kv"]["contexts"][0]["layers"]
    assert sum(device.kv_host_bytes for device in plan.devices) == 0
    planned = {reason.replace(" at 25 GB/s", "") for device in plan.devices for reason in device.kv_reasons}
    assert planned == {layer["reason"] for layer in layers} and len(planned) == 1


@pytest.mark.engine
@pytest.mark.parametrize("draft_slots", ["auto", 20])
@pytest.mark.parametrize("own_file", [False, True])
def test_slots_of_a_draft_agree_with_the_real_engine(
    engine: Path, model_path, tmp_path: Path, own_file: bool, draft_slots: int | str
) -> None:
    """The block in the model, and E2: a model without one beside the block's file. What both contexts pin of one model
    is counted once."""
    models = {"model": make_model("tiny", tmp_path / "m.gguf", mtp="no") if own_file else model_path("qwen4exp")}
    flags = ["--spec-type", "draft-mtp", "--spec-draft-n-max", "3"]
    if own_file:
        flags += ["-md", str(make_model("tiny", tmp_path / "mtp.gguf", mtp="only")), "-cmoed"]
    slots = {"expert_slots": 24, "draft_slots": draft_slots, "expert_batch": 4, "ctx": 4096}
    settings = Settings.load(model=models["model"], upstream=["-ngl", "99", "--cpu-moe", *flags], **slots)
    plan, why = plan_check.plan_of(settings, with_given(Machine(), vram="24", ram="192"))
    assert plan is not None, why
    assert (plan.slots, plan.draft_slots) == (24, 32 if draft_slots == "auto" else draft_slots)
    fleet = ExpertFleet(models.__getitem__, tmp_path)
    with closing(fleet), stopped_at_the_end(fleet) as alone:
        server = alone("model", 24, *flags, EXPERT_BATCH=4, DRAFT_SLOTS=draft_slots, **TRANSACTION)
        tokens = [100 + i % 900 for i in range(1200)]
        answer = server.complete(tokens, n=64)
        assert 0 < answer.timings["draft_n_accepted"] < answer.timings["draft_n"]
        # the same drafts of stock, whose one prompt is in micro-batches of the prefill phase, and no draft
        assert answer == fleet.stock_answer("model", tokens, 64, *flags, ubatch=PREFILL_UBATCH)
        plain = fleet.stock_answer("model", tokens, 64, ubatch=PREFILL_UBATCH)
        assert_same_but_for_ties(answer.tokens, plain, 1.0)
        found = {deviation.item: deviation for deviation in compare(plan, server.phase())}
    of_draft = {"slots of the draft per layer"}
    assert set(found) == {"slots per layer", "slots", "pinned host memory", "layers with slots", "ring"} | of_draft
    assert {item: str(deviation) for item, deviation in found.items() if deviation.error} == {}


# --- the picture ------------------------------------------------------------------------------------------------------


def test_bars_are_the_plans_sums(flash: ModelFacts, plan: Plan) -> None:
    columns = plan_plot.bars(Report(flash, MACHINE, plan))
    assert [label.replace("\n", " ") for label, _, _ in columns] == [
        "GPU 0 decode", "GPU 0 prefill", "GPU 1 decode", "GPU 1 prefill"]  # fmt: skip
    sums = [sum(sizes.values()) for _, sizes, _ in columns]
    assert sums == [size for device in plan.devices for size in (device.decode_bytes, device.prefill_bytes)]
    off = make_plan(flash, MACHINE, replace(plan.choices, switches=False))
    assert len(plan_plot.bars(Report(flash, MACHINE, off))) == 2


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_picture_is_written(flash: ModelFacts, plan: Plan, tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"plan.{suffix}"
    plan_plot.write_plot(Report(flash, MACHINE, plan), path)
    assert path.read_bytes().startswith(start)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_an_unknown_suffix_is_refused(flash: ModelFacts, plan: Plan, tmp_path: Path) -> None:
    for name in ("plan", "plan.gguf"):
        with pytest.raises(UsageError, match=name):
            plan_plot.write_plot(Report(flash, MACHINE, plan), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(
    flash: ModelFacts, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPrerequisite) as caught:
        plan_plot.write_plot(Report(flash, MACHINE, plan), tmp_path / "plan.png")
    assert "llama-phase[plot]" in caught.value.fix


def test_plot_of_the_command(flash: ModelFacts, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    words = ["plan", str(flash.path), "--vram", "24", "--ram", "192", "--ctx", "4096", "--plot", str(picture)]
    done = subprocess.run(
        [sys.executable, "-m", "llama_phase.cli", *words], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0 and "slots per layer" in done.stdout, done.stderr
    assert picture.stat().st_size > 10_000


def test_checked_of_the_command(tmp_path: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        words = ["plan", "m.gguf", "--checked"]
        environment = os.environ | {"LLAMA_PHASE_STATE_DIR": str(tmp_path), "LLAMA_PHASE_CONFIG": "off"}
        command = [sys.executable, "-m", "llama_phase.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)

    assert (run().returncode, "was compared yet" in run().stderr) == (1, True)
    plan_check.save(tmp_path, [Deviation("ring", 2 << 20, 1 << 20)], model=str(tmp_path / "m.gguf"), engine="e")
    assert run().stdout == "! ring: 2 MiB planned, 1 MiB reported (+100%)\n"
