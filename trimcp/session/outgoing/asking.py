"""Questions to the peer during a request: sent directly if a server may call its client, else by re-running.

If it may not (2026-07-28 basic/patterns/mrtr), a question without an answer cancels the handler's own scope. The
handler unwinds, its `finally` blocks run, and an `InputRequiredResult` sends the questions with the sealed answers so
far. The client's retry runs the handler again from the top. An answer is found by the digest of its question, never by
position, so a handler that asks something else is not given a wrong answer. This is one of the three places that may
depend on an era, and it uses only `Revision.server_may_call`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import trio

from trimcp.errors import AskRefused, CannotAsk, ErrorReply, McpError, Overloaded, RemoteError
from trimcp.protocol.request_state import InvalidState, Memory, question_key, request_digest
from trimcp.session.incoming.job import Job, Reports
from trimcp.session.session import Session
from trimcp.support.slotted import slotted
from trimcp.wire.capabilities import declares
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.common import REJECTED, RequestParams
from trimcp.wire.converter import NotInRevision, WireError, converter_for
from trimcp.wire.input_requests import (
    CreateMessageParams,
    CreateMessageRequest,
    ElicitRequest,
    ElicitURLParams,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
)
from trimcp.wire.methods import METHODS, Method

log: logging.Logger = logging.getLogger("trimcp.session")


@slotted
class Questions:
    """The questions and answers of one request, over all its rounds."""

    session: Session
    digest: str
    memory: Memory = attrs.field(factory=Memory)  # the contents of the sealed state of this round
    # what this run asked without having an answer, by key: method and raw params
    asked: dict[str, tuple[Method, Any]] = attrs.field(factory=dict)
    # payloads of answers, by key; `refusals` are errors that the peer answered with instead
    answers: dict[str, Any] = attrs.field(factory=dict)
    refusals: dict[str, McpError] = attrs.field(factory=dict)
    seen: dict[str, int] = attrs.field(factory=dict)  # how often each question was asked in this run
    unwound: bool = False  # whether this round is answered with questions

    async def resolve(self, job: Job) -> bytes | None:
        """Return the reply of a request whose handler unwound to ask, or None if it is to run again.

        It runs again at once only if a test forces re-running although the server may call its client.
        """
        session = self.session
        asked, self.asked = self.asked, {}
        self.seen = {}
        admission = job.request.admission
        if not admission.revision.server_may_call:
            self.memory.progress = None if job.reports is None else job.reports.kept
            state = session.sealer.seal(self.memory, digest=self.digest, principal=admission.principal, now=time.time())
            requests = {key: REQUESTS[method.name](params) for key, (method, params) in asked.items()}
            result = InputRequiredResult(input_requests=requests, request_state=state)
            self.unwound = True
            return session.engine.encode_result(job.request, result)
        with session.jobs.waiting_for_peer(job):
            for key, (method, params) in asked.items():
                try:
                    self.answers[key] = await _ask_directly(session, job, method.name, params)
                except McpError as error:
                    self.refusals[key] = error
        return None


def open_questions(session: Session, job: Job) -> Questions:
    """Return the questions of a request, with the contents of its `requestState` and `inputResponses`.

    Raises ErrorReply: the state was altered, has expired or belongs to another principal or request (-32602).
    """
    if isinstance(job.questions, Questions):
        return job.questions
    raw, name = job.request.raw, job.request.method.name
    revision, principal = job.request.admission.revision, job.request.admission.principal
    digest = request_digest(name, raw)
    questions = job.with_extras().questions = Questions(session, digest)
    if revision.server_may_call:
        return questions  # this revision does not define these members
    state = raw.get("requestState")
    if state is not None:
        if type(state) is not str:
            raise ErrorReply(INVALID_PARAMS, "requestState must be a string")
        try:
            questions.memory = session.sealer.open(state, digest=digest, principal=principal, now=time.time())
        except InvalidState as error:
            from trimcp.security import security_event

            security_event("request_state_refused", why=str(error), method=name, principal=principal)
            raise ErrorReply(INVALID_PARAMS, "requestState is not valid for this request") from None
        if questions.memory.progress is not None:
            job.reports = Reports(questions.memory.progress)
    responses = raw.get("inputResponses") or {}
    if type(responses) is not dict:
        raise ErrorReply(INVALID_PARAMS, "inputResponses must be an object")
    for key, answer in responses.items():
        if not isinstance(answer, dict):
            raise ErrorReply(INVALID_PARAMS, "every member of inputResponses must be an object")
        questions.memory.answers[key] = answer
    return questions


async def ask(session: Session, job: Job, name: str, params: Any, *, key: str | None = None) -> Any:
    """Send the peer a question during a request and return the payload of its answer.

    `key`: the name of the question when re-running; by default derived from what is asked. Raises AskRefused if the
    client answers with an error, ErrorReply if the answer is not valid, and CannotAsk if it did not declare the
    capability, does not answer in time, or cannot be asked from here.
    """
    if job.over:
        raise CannotAsk("the request is over; nobody waits for what would be asked")
    _check_capability(job, name, params)
    if job.request.admission.revision.server_may_call and not session.force_rerun:
        seconds = session.limits.answer_timeout
        with session.jobs.waiting_for_peer(job), trio.move_on_after(seconds):
            try:
                return _noted(name, await _ask_directly(session, job, name, params))
            except NotInRevision as error:
                raise CannotAsk(f"the client cannot be asked that: {error}") from None
        raise CannotAsk(f"the client did not answer within {seconds:g} seconds")
    return await _ask_by_rerun(session, job, name, params, key)


async def _ask_directly(session: Session, job: Job, name: str, params: Any) -> Any:
    try:
        return await session.call(name, params, origin=job.origin)
    except Overloaded:
        raise  # it was no no
    except RemoteError as error:
        raise AskRefused(name, error) from None


def _check_capability(job: Job, name: str, params: Any) -> None:
    admission = job.request.admission
    wanted = METHODS[name].capability or ""
    if isinstance(params, ElicitURLParams):
        wanted = "elicitation.url"
    elif isinstance(params, CreateMessageParams) and (params.tools or params.tool_choice):
        wanted = "sampling.tools"
    if declares(admission.capabilities, wanted):
        return
    required: dict[str, Any] = {}  # {"a": {"b": {}}} for "a.b"
    for part in reversed(wanted.split(".")):
        required = {part: required}
    message = f"the client did not declare the capability {wanted!r}"
    raise CannotAsk(message, None if admission.revision.server_may_call else required)


async def _ask_by_rerun(session: Session, job: Job, name: str, params: Any, key: str | None) -> Any:
    revision = job.request.admission.revision
    if not session.force_rerun and job.request.method.row.may_ask_from is None:
        raise CannotAsk(f"{job.request.method.name} may not ask the client anything in {revision.name}")
    questions = open_questions(session, job)
    converter = converter_for(revision)
    method = METHODS[name]
    raw = {} if params is None else converter.dump(params)
    base = question_key(name, raw, 0)
    occurrence = questions.seen.get(base, 0)
    questions.seen[base] = occurrence + 1
    key = key or question_key(name, raw, occurrence)
    if key in questions.refusals:
        raise questions.refusals[key]
    if key in questions.answers:
        await trio.lowlevel.checkpoint()
        return questions.answers[key]
    answer = questions.memory.answers.get(key)
    if answer is not None and questions.memory.asked.get(key, base) == base:
        await trio.lowlevel.checkpoint()
        assert method.result is not None
        try:
            try:
                payload = converter.load(answer, method.result)
            except WireError:
                payload = _noted(name, converter.load_readable(answer, method))
        except WireError as error:
            raise ErrorReply(INVALID_PARAMS, f"inputResponses.{key} is invalid: {error}"[:500]) from None
        questions.answers[key] = payload
        return payload
    questions.memory.answers.pop(key, None)
    _refuse_if_shielded(job)
    questions.asked[key] = (method, params)
    questions.memory.asked[key] = base
    assert job.scope is not None
    job.scope.cancel(reason="unwound to ask the client a question")
    await trio.sleep_forever()
    raise AssertionError("unreachable")


def _noted(name: str, payload: Any) -> Any:
    """Return the answer to a question; warn of what was left out of it because it could not be read."""
    for each in getattr(payload, REJECTED, ()):
        log.warning("the client answered %s with something that is left out: %s %s", name, each.place, each.reason)
    return payload


def _refuse_if_shielded(job: Job) -> None:
    """Raise if unwinding the request would not reach the current task, the handler's or one that it started."""
    if trio.current_effective_deadline() == -float("inf") or _reaches_here(job.scope):
        return
    work = None if job.extras is None else job.extras.work
    if work is None or not _reaches_here(work.scope):
        raise CannotAsk("a question cannot be asked inside a shielded scope: the handler has to unwind for it")


def _reaches_here(scope: trio.CancelScope | None) -> bool:
    """Return whether cancelling `scope` would cancel the current task.

    Trio has no function for this. But an earlier deadline on `scope` changes the effective one unless a shield is
    between.
    """
    assert scope is not None
    own = scope.deadline
    probe = min(trio.current_effective_deadline(), 1e300) - 1.0
    scope.deadline = probe
    reached = trio.current_effective_deadline() == probe
    scope.deadline = own
    return reached


REQUESTS: Final[Mapping[str, Callable[[Any], InputRequest]]] = {
    "elicitation/create": lambda params: ElicitRequest(params=params),
    "sampling/createMessage": lambda params: CreateMessageRequest(params=params),
    "roots/list": lambda params: ListRootsRequest(params=RequestParams()),  # `{}`: clients in Go need the member
}
"""What makes each question a part of a result, of its params."""
