"""Each message as a request of HTTP: what the client sends is what the service reads."""

from __future__ import annotations

from urllib.parse import unquote

import orjson
import pytest

from trimcp.agent_tools.bindings.http import forms_of, read_request
from trimcp.agent_tools.client.http import _sent
from trimcp.agent_tools.messages import http, messages
from trimcp.errors import LocalError
from trimcp.transports.http.interfaces import Head

ODD = "a b/c?d%2F\u00e9"
MESSAGES = [
    messages.ToolRequest(tool_name="t", request_id="r", arguments={"a": 1}, context_id=ODD, timeout=2.5),
    messages.RegisterTool(tool={"name": "t", "type": "x"}),
    messages.ListTools(),
    messages.ListTools(version="1.0"),
    messages.ListTools(name=ODD, version="1 & 2"),
    messages.RemoveTool(name=ODD),
    messages.RemoveTool(name="t", version="2"),
    messages.ContextCreate(context_id=ODD, state={"a": None}, ttl=3, session_id="s"),
    messages.ContextRead(context_id=ODD),
    messages.ContextUpdate(context_id=ODD, updates={"a": None, "version": 7}),
    messages.ContextUpdate(context_id=ODD, updates={}, version=0),
    messages.ContextDestroy(context_id=ODD, reason="it is done & over"),
    messages.ContextDestroy(session_id=ODD, reason="r"),
    messages.ContextWatch(context_id=f"{ODD}/events"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.type)
def test_what_a_client_sends_is_what_the_service_reads(message: messages.AgentMessage) -> None:
    form, target, body, headers = _sent(message)
    path, _, query = target.partition("?")
    head = Head(form.method, unquote(path), query, headers)
    read = read_request(forms_of(head.path)[head.method], head, {} if body is None else orjson.loads(body), True)
    assert (type(read), messages.as_json(read)) == (type(message), messages.as_json(message))


def test_every_message_of_an_agent_is_tried_that_has_a_form() -> None:
    assert {type(message) for message in MESSAGES} == {form.cls for form in http.FORMS}
    asking = {cls for cls in messages.MESSAGES.values() if cls.asks}
    assert asking - {form.cls for form in http.FORMS} == {messages.ContextUnwatch, messages.ProvideTools}


def test_what_belongs_to_a_stream_is_no_request() -> None:
    with pytest.raises(LocalError, match="context_unwatch has no request over HTTP"):
        _sent(messages.ContextUnwatch(context_id="c"))
