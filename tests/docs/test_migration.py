"""The pages for who comes from another SDK name each of its public features: those of mcp 2.3.0 and fastmcp 4.1.7."""

from __future__ import annotations

import re

import pytest

from tests.pages import ROOT

OFFICIAL = """
add_prompt add_resource add_tool call_tool completion custom_route description get_prompt icons instructions
list_prompts list_resource_templates list_resources list_tools middleware name prompt read_resource remove_prompt
remove_tool resource run run_sse_async run_stdio_async run_streamable_http_async session_manager sse_app
streamable_http_app title tool version website_url
auth_server_provider token_verifier tools resources extensions debug log_level warn_on_duplicate_resources
warn_on_duplicate_tools warn_on_duplicate_prompts dependencies lifespan auth resource_security request_state_security
cache_hints subscriptions
client_capabilities close_sse_stream close_standalone_sse_stream elicit elicit_url error headers info input_responses
log mcp_server notify_prompts_changed notify_resource_updated notify_resources_changed notify_tools_changed
protocol_version report_progress request_context request_id request_state session warning
AcceptedElicitation AssistantMessage Audio CancelledElicitation DeclinedElicitation Elicit Icon Image ListRoots Message
Resolve Sample UserMessage authenticated_principal UriTemplate UrlElicitationRequiredError
raise_exceptions read_timeout_seconds sampling_callback sampling_capabilities list_roots_callback logging_callback
message_handler client_info mode prior_discover elicitation_callback input_required_max_rounds cache complete listen
send_ping send_progress_notification send_roots_list_changed server_capabilities server_info set_logging_level
subscribe_resource unsubscribe_resource adopt discover discover_result dispatch_input_request initialize
initialize_result send_discover send_notification send_request validate_tool_result ClientSessionGroup
StdioServerParameters stdio_client stdio_server MCPError
"""
"""Public methods, attributes and arguments of `MCPServer`, `Context`, `Client`, `ClientSession`; exported classes."""

FASTMCP = """
add_completion_handler add_extension add_middleware add_prompt add_provider add_resource add_template add_tool
add_transform call_tool completion custom_route disable docket enable from_fastapi from_openapi generate_name
get_app_tool get_prompt get_resource get_resource_template get_tasks get_tool get_tool_by_hash http_app icons
instructions lifespan list_prompts list_resource_templates list_resources list_tools local_provider mount name prompt
read_resource render_prompt required_extensions resource run run_async run_http_async run_stdio_async tool transforms
version website_url wrap_transform
auth middleware providers tools on_duplicate mask_error_details dereference_schemas strict_input_validation
list_page_size resource_security request_state_security cache_ttl cache_scope tasks session_state_store
client_log_level experimental_capabilities
title description tags output_schema annotations meta app task timeout run_in_thread
client_extension_settings client_id client_supports_extension delete_state disable_components enable_components fastmcp
get_state is_background_task lifespan_context origin_request_id reset_visibility send_notification session_id set_state
task_id transport
cancel close complete_mcp get_skill initialize is_connected list_skills new progress session set_elicitation_callback
set_roots set_sampling_callback ClientGroup
AggregateProvider ClaudeSkillsProvider FastMCPProvider FileSystemProvider LocalProvider OpenAPIProvider ProxyProvider
SkillProvider SkillsDirectoryProvider Namespace PromptsAsTools ResourcesAsTools ToolTransform VersionFilter Visibility
BM25SearchTransform RegexSearchTransform
AuthMiddleware ResponseCachingMiddleware DereferenceRefsMiddleware ErrorHandlingMiddleware RetryMiddleware
LoggingMiddleware StructuredLoggingMiddleware PingMiddleware RateLimitingMiddleware SlidingWindowRateLimitingMiddleware
ResponseLimitingMiddleware TimingMiddleware DetailedTimingMiddleware ToolInjectionMiddleware
AccessToken DebugTokenVerifier IdentityAssertion JWTVerifier MultiAuth OAuthProvider OAuthProxy OIDCProxy
RemoteAuthProvider StaticTokenVerifier TokenVerifier require_roles require_scopes restrict_tag
FastMCPApp AppConfig ResourceCSP ResourcePermissions
CurrentAccessToken CurrentContext CurrentFastMCP CurrentHeaders CurrentRequest Progress Shared TokenClaim
Image Audio File call dev discover inspect install list project login logout whoami
bulk_tool_caller component_manager mcp_mixin
"""
"""Public methods and arguments of `FastMCP`, `Context` and `Client`; providers, transforms, middleware, the command."""


@pytest.mark.parametrize(("page", "names"), [("from-official-sdk.md", OFFICIAL), ("from-fastmcp.md", FASTMCP)])
def test_each_public_feature_has_its_line(page: str, names: str) -> None:
    text = (ROOT / "docs" / "howto" / page).read_text("utf-8")
    told = {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)}
    assert sorted(set(names.split()) - told) == []
