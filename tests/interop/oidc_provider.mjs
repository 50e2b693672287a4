// A certified authorization server, `oidc-provider`, with accounts that it believes and consent pages that it shows.
//
//     node tests/interop/oidc_provider.mjs [nonces] [wide] [path]
//
// Prints its address, which is its issuer; with "path" the issuer is "/tenant" there. Access tokens are JWTs for the resource that was asked for; one whose path
// ends in "/opaque" gets tokens that say nothing, for introspection. "nonces" asks for a nonce in every proof of
// possession. Clients may ask only for the scopes that they were registered for; with "wide" they may ask for all.
// TRIMCP_NODE_OIDC_PROVIDER names the node_modules folder with the package, TRIMCP_ROBOT_KEYS the published keys of
// the client "signing-robot".

import { generateKeyPairSync, randomBytes } from 'node:crypto';
import { createServer } from 'node:http';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const entry = join(process.env.TRIMCP_NODE_OIDC_PROVIDER, 'oidc-provider', 'lib', 'index.js');
const { Provider } = await import(pathToFileURL(entry));
const words = process.argv.slice(2);
const path = words.includes('path') ? '/tenant' : '';

function signingKey(kind, options, alg) {
    const { privateKey } = generateKeyPairSync(kind, options);
    return { ...privateKey.export({ format: 'jwk' }), alg, use: 'sig', kid: alg };
}

const robot = { grant_types: ['client_credentials'], redirect_uris: [], response_types: [] };
const scopes = ['files:read', 'files:write'];
const configuration = {
    jwks: { keys: [signingKey('rsa', { modulusLength: 2048 }, 'RS256'), signingKey('ec', { namedCurve: 'P-256' }, 'ES256')] },
    cookies: { keys: [randomBytes(32).toString('hex')] },
    scopes: ['openid', 'offline_access', ...scopes],
    clients: [
        { ...robot, client_id: 'robot', client_secret: 's3cret', token_endpoint_auth_method: 'client_secret_basic' },
        {
            ...robot,
            client_id: 'signing-robot',
            token_endpoint_auth_method: 'private_key_jwt',
            token_endpoint_auth_signing_alg: 'ES256',
            jwks: JSON.parse(process.env.TRIMCP_ROBOT_KEYS)
        },
        {
            client_id: 'app',
            client_secret: 'also s3cret: + & %',
            application_type: 'native', // for which any port of this machine is good
            redirect_uris: ['http://127.0.0.1/callback'],
            grant_types: ['authorization_code', 'refresh_token'],
            token_endpoint_auth_method: 'client_secret_basic'
        },
        { ...robot, client_id: 'the-server', client_secret: 'hush', grant_types: [] }
    ],
    features: {
        devInteractions: { enabled: true },
        registration: { enabled: true },
        clientCredentials: { enabled: true },
        introspection: { enabled: true },
        revocation: { enabled: true },
        dPoP: { enabled: true, nonceSecret: randomBytes(32), requireNonce: () => words.includes('nonces') },
        resourceIndicators: {
            enabled: true,
            useGrantedResource: () => true,
            getResourceServerInfo: (_, resource) => ({
                scope: scopes.join(' '),
                audience: resource,
                accessTokenTTL: 600,
                accessTokenFormat: resource.endsWith('/opaque') ? 'opaque' : 'jwt',
                jwt: { sign: { alg: 'ES256' } }
            })
        }
    },
    ttl: { Grant: 3600, Interaction: 600, Session: 3600, IdToken: 600, RefreshToken: 3600, ClientCredentials: 600 }
};

/** Leave out of a registration which scopes it is for, so that it is for all. */
async function widen(request) {
    const parts = [];
    for await (const part of request) parts.push(part);
    const { scope, ...rest } = JSON.parse(Buffer.concat(parts));
    request.body = rest;
}

/** Take the issuer's path off the request's: in front, or behind a well-known one (RFC 8414 section 3.1). */
function mount(request) {
    const [, wellKnown = '', rest = '/nowhere'] = /^(\/\.well-known\/[^/]+)?\/tenant(.*)$/.exec(request.url) ?? [];
    request.url = wellKnown + rest;
    request.originalUrl = path + request.url; // from which it learns the path
}

const http = createServer();
http.listen(0, '127.0.0.1', () => {
    const base = `http://127.0.0.1:${http.address().port}`;
    const provider = new Provider(base + path, configuration);
    provider.on('server_error', (_, error) => console.error(error));
    for (const event of ['authorization.error', 'grant.error', 'registration_create.error', 'introspection.error']) {
        provider.on(event, (_, error) => console.error(`${event}: ${error.message} ${error.error_description ?? ''}`));
    }
    const answer = provider.callback();
    http.on('request', async (request, response) => {
        if (path) mount(request);
        if (words.includes('wide') && request.method === 'POST' && request.url === '/reg') await widen(request);
        answer(request, response);
    });
    console.log(base);
});
process.on('SIGTERM', () => process.exit(0));
