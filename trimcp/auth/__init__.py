"""Who may do what: access tokens, got by clients and checked by servers (`pip install "trimcp[auth]"`)."""

from trimcp.support.lazy import lazy_names as _lazy_names

# The one list of names; the stub for type checkers is written from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.auth.browser": "Browser PastedUrl Redirect UserAgent",
    "trimcp.auth.credentials": "Credentials Registration StoreKey Tokens",
    "trimcp.auth.grants": "Assertion AuthorizationCode ClientCredentials EnterpriseManaged Grant JwtBearer",
    "trimcp.auth.jose": "SigningKey",
    "trimcp.auth.issuers": "Introspection Issuer",
    "trimcp.auth.oauth": "OAuth",
    "trimcp.auth.resource_server": "ResourceServer TokenBinding",
    "trimcp.auth.stores": "CredentialStore FileStore KeyringStore MemoryStore default_path",
    "trimcp.errors": "AuthorizationError",
    "trimcp.principal": "Principal",
    "trimcp.transports.http.peers.identity": "Refused bearer_tokens",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
