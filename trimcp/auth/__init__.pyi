# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.auth.browser import Browser as Browser
from trimcp.auth.browser import PastedUrl as PastedUrl
from trimcp.auth.browser import Redirect as Redirect
from trimcp.auth.browser import UserAgent as UserAgent
from trimcp.auth.credentials import Credentials as Credentials
from trimcp.auth.credentials import Registration as Registration
from trimcp.auth.credentials import StoreKey as StoreKey
from trimcp.auth.credentials import Tokens as Tokens
from trimcp.auth.grants import Assertion as Assertion
from trimcp.auth.grants import AuthorizationCode as AuthorizationCode
from trimcp.auth.grants import ClientCredentials as ClientCredentials
from trimcp.auth.grants import EnterpriseManaged as EnterpriseManaged
from trimcp.auth.grants import Grant as Grant
from trimcp.auth.grants import JwtBearer as JwtBearer
from trimcp.auth.issuers import Introspection as Introspection
from trimcp.auth.issuers import Issuer as Issuer
from trimcp.auth.jose import SigningKey as SigningKey
from trimcp.auth.oauth import OAuth as OAuth
from trimcp.auth.resource_server import ResourceServer as ResourceServer
from trimcp.auth.resource_server import TokenBinding as TokenBinding
from trimcp.auth.stores import CredentialStore as CredentialStore
from trimcp.auth.stores import FileStore as FileStore
from trimcp.auth.stores import KeyringStore as KeyringStore
from trimcp.auth.stores import MemoryStore as MemoryStore
from trimcp.auth.stores import default_path as default_path
from trimcp.errors import AuthorizationError as AuthorizationError
from trimcp.principal import Principal as Principal
from trimcp.transports.http.peers.identity import Refused as Refused
from trimcp.transports.http.peers.identity import bearer_tokens as bearer_tokens

__all__ = [
    "Assertion",
    "AuthorizationCode",
    "AuthorizationError",
    "Browser",
    "ClientCredentials",
    "CredentialStore",
    "Credentials",
    "EnterpriseManaged",
    "FileStore",
    "Grant",
    "Introspection",
    "Issuer",
    "JwtBearer",
    "KeyringStore",
    "MemoryStore",
    "OAuth",
    "PastedUrl",
    "Principal",
    "Redirect",
    "Refused",
    "Registration",
    "ResourceServer",
    "SigningKey",
    "StoreKey",
    "TokenBinding",
    "Tokens",
    "UserAgent",
    "bearer_tokens",
    "default_path",
]
