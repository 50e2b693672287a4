"""A server made with the official Python SDK for those who have logged in at an authorization server.

    python tests/interop/official_protected_server.py ISSUER

Prints its address. It takes JWT access tokens for "/mcp" there with the scope `files:read`. It runs with both
generations of the SDK.
"""

import sys
from typing import Any

import jwt
from asgi_serving import serve_at
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer


class Verifier(TokenVerifier):
    """Takes the JWTs of one issuer for one resource."""

    def __init__(self, issuer: str, resource: str) -> None:
        self.issuer = issuer
        self.resource = resource
        self.keys = jwt.PyJWKClient(f"{issuer}/jwks")

    async def verify_token(self, token: str) -> AccessToken | None:
        """Judge one."""
        try:
            key = self.keys.get_signing_key_from_jwt(token)
            said: dict[str, Any] = jwt.decode(
                token, key, algorithms=["ES256"], audience=self.resource, issuer=self.issuer
            )
        except jwt.PyJWTError:
            return None
        return AccessToken(
            token=token,
            client_id=said["client_id"],
            scopes=said.get("scope", "").split(),
            expires_at=said["exp"],
            resource=self.resource,
            subject=said["sub"],
            claims=said,
        )


def make_app(issuer: str, base: str) -> Any:
    """Return the server as an ASGI application for its address."""
    resource = f"{base}/mcp"
    # From text: a URL that pydantic has made before has a "/" behind the issuer, which then names another one.
    auth = AuthSettings.model_validate(
        {
            "issuer_url": issuer,
            "resource_server_url": resource,
            "required_scopes": ["files:read"],
            "validate_token_resource": True,
        }
    )
    server = MCPServer("official", auth=auth, token_verifier=Verifier(issuer, resource))

    @server.tool()
    async def whoami() -> str:
        """Say whom the token lets in."""
        token = get_access_token()
        return "nobody" if token is None else str(token.subject)

    return server.streamable_http_app()


if __name__ == "__main__":
    serve_at(lambda base: make_app(sys.argv[1], base))
