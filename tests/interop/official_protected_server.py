"""A server made with the official Python SDK for those who have logged in at an authorization server.

    python tests/interop/official_protected_server.py ISSUER

Prints its address. It takes JWT access tokens for "/mcp" there with the scope `files:read`.
"""

import socket
import sys
from typing import Any

import jwt
import uvicorn
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken, TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer


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


def main(issuer: str) -> None:
    """Serve over HTTP on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # From text: an AnyHttpUrl that is made before puts a "/" behind the issuer, which then names another one.
    auth = AuthSettings.model_validate(
        {
            "issuer_url": issuer,
            "resource_server_url": f"{base}/mcp",
            "required_scopes": ["files:read"],
            "validate_token_resource": True,
        }
    )
    server = MCPServer("official", version="1.0", auth=auth, token_verifier=Verifier(issuer, f"{base}/mcp"))

    @server.tool()
    async def whoami() -> str:
        """Say whom the token lets in."""
        token = get_access_token()
        return "nobody" if token is None else str(token.subject)

    @server.tool()
    async def token_id() -> str:
        """Tell one token from the next."""
        token = get_access_token()
        return "" if token is None or token.claims is None else str(token.claims["jti"])

    print(base, flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(sys.argv[1])
