// The official TypeScript SDK's client drives our server.
//
//     node tests/interop/node_client.mjs http|sse legacy|modern ADDRESS LOSSY_ADDRESS SCENARIO...
//
// Prints a line of JSON for each scenario: its name, and what went wrong in it, or nothing. An address is a server's
// without path; the second leads through a relay that loses connections. TRIMCP_NODE_CLIENT names the node_modules
// folder with the client.

import assert from 'node:assert/strict';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const entry = join(process.env.TRIMCP_NODE_CLIENT, '@modelcontextprotocol', 'client', 'dist', 'index.mjs');
const { Client, SSEClientTransport, StreamableHTTPClientTransport } = await import(pathToFileURL(entry));

const [transport, era, address, lossy, ...wanted] = process.argv.slice(2);
const modern = era === 'modern';
let names = 0;
const newName = () => `node-${transport}-${era}-${names++}`;

function open(where = address) {
    return transport === 'http'
        ? new StreamableHTTPClientTransport(new URL(`${where}/mcp`))
        : new SSEClientTransport(new URL(`${where}/sse`));
}

/** Run `body` with a connected client, on which `prepare` may set handlers before. */
async function converse(body, { where, capabilities = {}, prepare = () => {} } = {}) {
    const versionNegotiation = { mode: modern ? { pin: '2026-07-28' } : 'legacy' };
    const client = new Client({ name: 'node', version: '1' }, { capabilities, versionNegotiation });
    prepare(client);
    const channel = open(where);
    await client.connect(channel);
    try {
        await body(client, channel);
    } finally {
        await client.close();
    }
}

/** The text of a result that consists of text alone. */
function text(result) {
    assert.ok(!result.isError, JSON.stringify(result));
    assert.equal(result.content.length, 1);
    return result.content[0].text;
}

const call = (client, name, args = {}, options = undefined) => client.callTool({ name, arguments: args }, options);

/** Collects what arrives, and lets one wait for the next. */
class Mailbox {
    #arrived = [];
    #waiting = [];
    put(item) {
        const waiting = this.#waiting.shift();
        if (waiting) waiting(item);
        else this.#arrived.push(item);
    }
    next() {
        if (this.#arrived.length) return Promise.resolve(this.#arrived.shift());
        return new Promise(resolve => this.#waiting.push(resolve));
    }
}

const scenarios = {
    async introduction() {
        await converse(async client => {
            assert.equal(client.getNegotiatedProtocolVersion(), modern ? '2026-07-28' : '2025-11-25');
            assert.equal(client.getServerVersion().name, 'interop');
            assert.equal(client.getInstructions(), 'Ask for anything.');
            if (!modern) await client.ping();
        });
    },

    async detection() {
        const client = new Client({ name: 'node', version: '1' }, { versionNegotiation: { mode: 'auto' } });
        await client.connect(open());
        assert.equal(client.getNegotiatedProtocolVersion(), '2026-07-28');
        assert.equal(text(await call(client, 'echo', { text: 'hi' })), 'hi');
        await client.close();
    },

    async tools() {
        await converse(async client => {
            const tools = new Map((await client.listTools()).tools.map(tool => [tool.name, tool]));
            assert.deepEqual(tools.get('echo').inputSchema.required, ['text']);
            assert.equal(tools.get('add').outputSchema.properties.total.type, 'integer');
            assert.equal(text(await call(client, 'echo', { text: 'grüße 🎈\n' })), 'grüße 🎈\n');
            assert.deepEqual((await call(client, 'add', { a: 2, b: 3 })).structuredContent, { total: 5 });
        });
    },

    async errors() {
        await converse(async client => {
            const failed = await call(client, 'fail');
            assert.ok(failed.isError);
            assert.equal(failed.content[0].text, 'no luck today');
            assert.ok((await call(client, 'add', { a: 2, b: 'three' })).isError);
            await assert.rejects(call(client, 'crash'), error => error.code === -32603 && !/swordfish/.test(error));
            await assert.rejects(call(client, 'no_such_tool'), error => error.code === -32602);
            // It makes one error of -32002, the code until 2025-11-25, and -32602.
            const missing = { code: -32602, uri: 'interop://nowhere' };
            await assert.rejects(client.readResource({ uri: 'interop://nowhere' }), missing);
            assert.equal(text(await call(client, 'echo', { text: 'still here' })), 'still here');
        });
    },

    async progress() {
        await converse(async client => {
            const seen = [];
            await call(client, 'count', { to: 50 }, { onprogress: step => seen.push(step) });
            const wanted = Array.from({ length: 50 }, (_, n) => ({ progress: n + 1, total: 50, message: `now ${n + 1}` }));
            // Over HTTP+SSE this client forgets progress that arrives together with the answer.
            if (transport === 'sse') wanted.length = seen.length;
            assert.deepEqual(seen, wanted);
        });
    },

    async logging() {
        const logs = [];
        const prepare = client =>
            client.setNotificationHandler('notifications/message', ({ params }) => void logs.push([params.level, params.data]));
        await converse(
            async client => {
                if (modern) {
                    const _meta = { 'io.modelcontextprotocol/logLevel': 'warning' };
                    await client.callTool({ name: 'warn', arguments: { text: 'just right' }, _meta });
                    _meta['io.modelcontextprotocol/logLevel'] = 'error';
                    await client.callTool({ name: 'warn', arguments: { text: 'too low' }, _meta });
                } else {
                    await client.setLoggingLevel('error');
                    await call(client, 'warn', { text: 'too low' });
                    await client.setLoggingLevel('warning');
                    await call(client, 'warn', { text: 'just right' });
                }
                assert.deepEqual(logs, [['warning', 'just right']]);
            },
            { prepare }
        );
    },

    async cancellation() {
        await converse(async client => {
            const name = newName();
            const giveUp = new AbortController();
            const options = { signal: giveUp.signal, onprogress: () => giveUp.abort('given up') };
            await assert.rejects(call(client, 'wait_for_ever', { name }, options));
            assert.equal(text(await call(client, 'was_cancelled', { name })), 'stopped');
        });
    },

    async timeout() {
        await converse(async client => {
            const name = newName();
            await assert.rejects(call(client, 'wait_for_ever', { name }, { timeout: 1000 }), /timed out/i);
            assert.equal(text(await call(client, 'was_cancelled', { name })), 'stopped');
        });
    },

    async questions() {
        const capabilities = { elicitation: {}, sampling: {}, roots: {} };
        const prepare = client => {
            client.setRequestHandler('elicitation/create', async ({ params }) => ({
                action: 'accept',
                content: /name/.test(params.message) ? { name: 'Ada' } : { colour: 'green' }
            }));
            client.setRequestHandler('sampling/createMessage', async ({ params }) => {
                assert.equal(params.maxTokens, 50);
                return { role: 'assistant', model: 'deep-thought', content: { type: 'text', text: '42' } };
            });
            client.setRequestHandler('roots/list', async () => ({ roots: [{ uri: 'file:///srv/data' }] }));
        };
        await converse(
            async client => {
                assert.equal(text(await call(client, 'greet')), 'Ada likes green');
                assert.equal(text(await call(client, 'think', { question: '?' })), 'deep-thought says 42');
                assert.match(JSON.stringify(await call(client, 'places')), /file:\/\/\/srv\/data/);
            },
            { capabilities, prepare }
        );
    },

    async questions_it_cannot_answer() {
        await converse(async client => {
            if (modern) await assert.rejects(call(client, 'greet'), error => error.code === -32021);
            else assert.ok((await call(client, 'greet')).isError);
        });
    },

    async resources() {
        await converse(async client => {
            const { resources } = await client.listResources();
            assert.deepEqual(resources.map(({ uri }) => uri).sort(), ['interop://bytes', 'interop://greeting']);
            const { resourceTemplates } = await client.listResourceTemplates();
            assert.deepEqual(resourceTemplates.map(each => each.uriTemplate), ['interop://items/{name}']);
            const read = async uri => (await client.readResource({ uri })).contents[0];
            assert.equal((await read('interop://greeting')).text, 'hello');
            const bytes = Buffer.from((await read('interop://bytes')).blob, 'base64');
            assert.deepEqual([...bytes], Array.from({ length: 256 }, (_, n) => n));
            assert.equal((await read('interop://items/lamp')).text, 'item lamp');
        });
    },

    async prompts() {
        await converse(async client => {
            const { prompts } = await client.listPrompts();
            assert.deepEqual(prompts[0].arguments.map(each => [each.name, each.required]), [['path', true]]);
            const { messages } = await client.getPrompt({ name: 'review', arguments: { path: 'setup.py' } });
            assert.equal(messages[0].content.text, 'Please review setup.py.');
            const ref = { type: 'ref/prompt', name: 'review' };
            const { completion } = await client.complete({ ref, argument: { name: 'path', value: 'set' } });
            assert.deepEqual(completion.values, ['setup.py', 'setup.cfg']);
        });
    },

    async changes() {
        const heard = new Mailbox();
        const prepare = client => {
            for (const method of ['notifications/tools/list_changed', 'notifications/resources/updated'])
                client.setNotificationHandler(method, () => heard.put(method));
        };
        await converse(
            async client => {
                const uri = 'interop://greeting';
                let subscription;
                if (modern) {
                    subscription = await client.listen({ toolsListChanged: true, resourceSubscriptions: [uri] });
                    assert.deepEqual(subscription.honoredFilter, { toolsListChanged: true, resourceSubscriptions: [uri] });
                } else {
                    await client.subscribeResource({ uri });
                }
                const name = newName();
                await call(client, 'grow', { name });
                assert.deepEqual(
                    [await heard.next(), await heard.next()].sort(),
                    ['notifications/resources/updated', 'notifications/tools/list_changed']
                );
                assert.equal(text(await call(client, name)), 'new');
                if (modern) {
                    await subscription.close();
                    assert.equal(await subscription.closed, 'local');
                } else {
                    await client.unsubscribeResource({ uri });
                    await call(client, 'grow', { name: newName() });
                    assert.equal(await heard.next(), 'notifications/tools/list_changed');
                }
            },
            { prepare }
        );
    },

    async large_result() {
        await converse(async client => {
            assert.equal(text(await call(client, 'large', { size: 3_000_000 })), 'x'.repeat(3_000_000));
        });
    },

    async fifty_calls_at_once() {
        await converse(async client => {
            const numbers = Array.from({ length: 50 }, (_, n) => `${n}`);
            const results = await Promise.all(numbers.map(text => call(client, 'echo', { text })));
            assert.deepEqual(results.map(text), numbers);
        });
    },

    async polling() {
        await converse(async client => assert.deepEqual(await stepsOf(client, 'poll'), ['before', 'after']));
    },

    async lost_connection() {
        await converse(
            async client => {
                if (modern) {
                    // It is not told by its own transport, and waits for as long as it would have without.
                    await assert.rejects(stepsOf(client, 'lose_connection', { timeout: 1000 }), /timed out/i);
                    assert.equal(text(await call(client, 'echo', { text: 'still here' })), 'still here');
                } else {
                    assert.deepEqual(await stepsOf(client, 'lose_connection'), ['cut-here', 'after']);
                }
            },
            { where: lossy }
        );
    },

    async lost_stream() {
        const heard = new Mailbox();
        const prepare = client =>
            client.setNotificationHandler('notifications/resources/updated', ({ params }) => heard.put(params.uri));
        await converse(
            async client => {
                for (const name of ['cut-here', 'lamp']) await client.subscribeResource({ uri: `interop://items/${name}` });
                for (const name of ['cut-here', 'lamp']) {
                    await call(client, 'touch', { name });
                    assert.equal(await heard.next(), `interop://items/${name}`);
                }
            },
            { where: lossy, prepare }
        );
    },

    async leaving() {
        await converse(async (client, channel) => {
            const session = channel.sessionId;
            assert.equal(await ping(session), 200);
            await channel.terminateSession();
            assert.equal(await ping(session), 404);
        });
    }
};

/** The progress of a call, which has to end well. */
async function stepsOf(client, tool, options = {}) {
    const steps = [];
    const result = await call(client, tool, {}, { onprogress: step => steps.push(step.message), ...options });
    assert.equal(text(result), 'done');
    return steps;
}

const ping = async session => {
    const headers = { 'mcp-session-id': session, 'content-type': 'application/json' };
    headers.accept = 'application/json, text/event-stream';
    const body = JSON.stringify({ jsonrpc: '2.0', id: 1, method: 'ping' });
    return (await fetch(`${address}/mcp`, { method: 'POST', headers, body })).status;
};

// What a scenario leaves behind must not end the others.
const strays = [];
process.on('unhandledRejection', reason => strays.push(`left behind: ${reason?.stack ?? reason}`));

for (const scenario of wanted) {
    let timer;
    let error = '';
    try {
        const late = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error('20 seconds')), 20_000)));
        await Promise.race([scenarios[scenario](), late]);
    } catch (failure) {
        error = failure?.stack ?? String(failure);
    }
    clearTimeout(timer);
    await new Promise(resolve => setImmediate(resolve));
    error += strays.splice(0).join('\n');
    console.log(JSON.stringify({ scenario, error }));
}
process.exit(0);
