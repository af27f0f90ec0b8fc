"""A plan beside a supervised server: what cannot fit is refused before it is loaded, and what was planned is compared
with what the engine reports once it is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_phase import plan_check
from llama_phase.client import Client, RequestFailed
from llama_phase.companions import Companion
from llama_phase.configuration import configuration_of
from llama_phase.errors import UsageError
from llama_phase.hardware import Machine
from llama_phase.plan import Plan
from llama_phase.settings import Settings
from llama_phase.upstream_flags import DRAFT_MODEL, flag_value

if TYPE_CHECKING:
    from llama_phase.server import Server

REPORT_S = 10.0


class PlanCheck(Companion):
    """Only for settings that plans are for; `say` gets a sentence when a plan was off."""

    def __init__(self, folder: Path, say: Callable[[str], None], *, machine: Machine | None = None):
        """`folder` is the supervisor's. `machine` None: this one, as it is before each first start."""
        self._folder, self._say, self._machine = folder, say, machine
        self._plan: Plan | None = None
        self._planned: dict[str, Any] = {}
        self._beside_draft: dict[str, Any] = {}  # settings, for a draft that is loaded after slots that are auto
        self._checking: threading.Thread | None = None

    def starting(self, settings: Settings) -> None:
        """Raises UsageError for what cannot fit, when these settings are started for the first time: right after a
        death its memory may not be free again yet."""
        asked = configuration_of(settings, "").settings
        if asked != self._planned:
            self._make_plan(settings)
            self._planned = asked
        draft = Path(flag_value(settings.upstream, DRAFT_MODEL) or "").name
        if (slots := self._beside_draft.get("expert_slots")) is not None:
            self._say(f"slots: {slots}, so that the draft from {draft} fits")
        if (device := self._beside_draft.get("draft_device")) is not None:
            self._say(f"the draft from {draft} goes to {device}, which has most room for it (--draft-device)")

    def resolved(self, settings: Settings) -> Settings:
        return settings.model_copy(update=self._beside_draft) if self._beside_draft else settings

    def _make_plan(self, settings: Settings) -> None:
        self._beside_draft = {}
        self._plan, _ = plan_check.plan_of(settings, self._machine)
        if self._plan is None:
            return
        found = plan_check.for_a_late_draft(self._plan, settings)
        if found:
            settings = settings.model_copy(update=found)
            self._plan, _ = plan_check.plan_of(settings, self._machine)
        short = plan_check.shortfalls(self._plan, settings) if self._plan is not None else []
        if short:
            raise UsageError(
                f"{settings.model.name} does not fit: {'; '.join(short)}",
                fix=f"`llama-phase plan {settings.model}` says what would; LLAMA_PHASE_CHECK_PLAN=off loads it anyway",
            )
        self._beside_draft = found

    def ready(self, server: Server) -> None:
        if self._plan is not None:
            given = (self._plan, server.client(), str(server.settings.model.absolute()))
            self._checking = threading.Thread(target=self._check, args=given, name="llama-phase-plan", daemon=True)
            self._checking.start()

    def _check(self, plan: Plan, client: Client, model: str) -> None:
        try:
            with client:
                phase, props = client.phase(timeout_s=REPORT_S), client.props(timeout_s=REPORT_S)
            found = plan_check.compare(plan, phase or {}, props)
            plan_check.save(self._folder, found, model=model, engine=str(props.get("build_info", "")))
        except (RequestFailed, OSError):  # what serves is not touched by a comparison that could not be made
            return
        sentence = plan_check.summary(found)
        if sentence:
            self._say(sentence)
