// The official TypeScript SDK's client logs in to our server at an authorization server, and asks for more.
//
//     node tests/interop/node_login.mjs legacy|modern|legacy-dpop|modern-dpop URL PYTHON SCENARIO...
//
// Prints a line of JSON for each scenario: its name, and what went wrong in it, or nothing. `PYTHON log_in.py` is the
// person before the browser. TRIMCP_NODE_CLIENT names the node_modules folder with the client.

import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { promisify } from 'node:util';

const entry = join(process.env.TRIMCP_NODE_CLIENT, '@modelcontextprotocol', 'client', 'dist', 'index.mjs');
const { Client, DpopSession, StreamableHTTPClientTransport, UnauthorizedError } = await import(pathToFileURL(entry));

const [way, url, python, ...wanted] = process.argv.slice(2);
const [era, kind = 'bearer'] = way.split('-');
const mode = era === 'modern' ? { pin: '2026-07-28' } : 'legacy';

/** Keeps what the client wants kept, and sends the person to log in. */
class Provider {
    redirectUrl = 'http://127.0.0.1:8765/callback';
    clientMetadata = {
        client_name: 'node',
        redirect_uris: [this.redirectUrl],
        grant_types: ['authorization_code', 'refresh_token'],
        response_types: ['code'],
        token_endpoint_auth_method: 'none',
        application_type: 'native'
    };
    logins = 0;
    #session = kind === 'dpop' ? DpopSession.create() : undefined;
    dpop = () => this.#session;
    state = () => 'a state';
    clientInformation = () => this.client;
    saveClientInformation = client => void (this.client = client);
    tokens = () => this.kept;
    saveTokens = tokens => void (this.kept = tokens);
    codeVerifier = () => this.verifier;
    saveCodeVerifier = verifier => void (this.verifier = verifier);
    invalidateCredentials = scope => {
        if (scope === 'all' || scope === 'client') this.client = undefined;
        if (scope === 'all' || scope === 'tokens') this.kept = undefined;
    };
    async redirectToAuthorization(page) {
        this.logins++;
        const script = join(import.meta.dirname, 'log_in.py');
        const { stdout } = await promisify(execFile)(python, [script, page.href], { timeout: 20_000 });
        this.answer = new URL(stdout.trim()).searchParams;
        assert.equal(this.answer.get('state'), 'a state');
    }
}

/** Do what may need a login; log in, and do it again. */
async function withLogin(provider, transport, action) {
    try {
        return await action();
    } catch (error) {
        if (!(error instanceof UnauthorizedError)) throw error;
        await transport.finishAuth(provider.answer);
        return await action();
    }
}

const provider = new Provider();
const call = async (client, name) => {
    const result = await client.callTool({ name, arguments: {} });
    assert.ok(!result.isError, JSON.stringify(result));
    return result.content[0].text;
};

async function converse(body) {
    let client, transport;
    const connect = async () => {
        client = new Client({ name: 'node', version: '1' }, { versionNegotiation: { mode } });
        const first = transport;
        transport = new StreamableHTTPClientTransport(new URL(url), { authProvider: provider });
        try {
            await client.connect(transport);
        } catch (error) {
            if (first === undefined && error instanceof UnauthorizedError) {
                await transport.finishAuth(provider.answer);
                return await connect();
            }
            throw error;
        }
    };
    await connect();
    try {
        await body(client, transport);
    } finally {
        await client.close();
    }
}

const scenarios = {
    async login() {
        await converse(async client => {
            assert.equal(await call(client, 'whoami'), 'ann');
            assert.deepEqual((await client.listTools()).tools.map(tool => tool.name), ['whoami', 'token_id']);
        });
        assert.equal(provider.logins, 1);
        assert.equal(provider.kept.token_type.toLowerCase(), kind);
    },

    async renewal() {
        await converse(async client => {
            const first = await call(client, 'token_id');
            // What is no token any more is refused, and renewed without the person.
            provider.kept = { ...provider.kept, access_token: `${provider.kept.access_token.slice(0, -8)}AAAAAAAA` };
            assert.notEqual(await call(client, 'token_id'), first);
        });
        assert.equal(provider.logins, 1);
    },

    async more_scopes() {
        await converse(async (client, transport) => {
            assert.equal(await withLogin(provider, transport, () => call(client, 'write')), 'written');
            assert.equal((await client.listTools()).tools.length, 3);
        });
        assert.equal(provider.logins, 2);
    }
};

for (const scenario of wanted) {
    let error = '';
    try {
        await scenarios[scenario]();
    } catch (failure) {
        error = failure?.stack ?? String(failure);
    }
    console.log(JSON.stringify({ scenario, error }));
}
process.exit(0);
