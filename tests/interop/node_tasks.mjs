// What the official package for tasks makes of our server, through the official TypeScript SDK's client.
//
//     node tests/interop/node_tasks.mjs URL
//
// Prints one object of JSON. TRIMCP_NODE_TASKS names the node_modules folder with both.

import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const load = (...path) => import(pathToFileURL(join(process.env.TRIMCP_NODE_TASKS, '@modelcontextprotocol', ...path)));
const { Client, StreamableHTTPClientTransport } = await load('client', 'dist', 'index.mjs');
const { createTaskSessionFromClient, resultFromTaskOutcome } = await load('ext-tasks', 'dist', 'client', 'index.js');

const [url] = process.argv.slice(2);
const version = '2026-07-28';
const info = { name: 'node-tasks', version: '1' };
const capabilities = { elicitation: {}, extensions: { 'io.modelcontextprotocol/tasks': {} } };
const client = new Client(info, { capabilities, versionNegotiation: { mode: { pin: version } } });
await client.connect(new StreamableHTTPClientTransport(new URL(url)));

// The SDK's client refuses answers that are tasks, so the package has its host send the requests.
let lastId = 0;

async function rawDispatch(request, options) {
    const { method, params } = request;
    const name = params.taskId ?? params.name;
    const response = await fetch(url, {
        method: 'POST',
        headers: {
            'content-type': 'application/json',
            accept: 'application/json, text/event-stream',
            'mcp-protocol-version': version,
            'mcp-method': method,
            ...(name === undefined ? {} : { 'mcp-name': name }),
        },
        body: JSON.stringify({ jsonrpc: '2.0', id: `raw-${++lastId}`, ...request }),
        signal: options?.signal,
    });
    const text = await response.text();
    const lines = text.split('\n').filter((line) => line.startsWith('data: '));
    const message = JSON.parse(lines.length ? lines.at(-1).slice(6) : text);
    return message.error ? { kind: 'error', error: message.error } : { kind: 'result', result: message.result };
}

const session = createTaskSessionFromClient(client, {
    endpointId: 'ours',
    rawDispatch,
    v2RequestFraming: { protocolVersion: version, clientInfo: info, clientCapabilities: capabilities },
    onInputRequest: async () => ({ kind: 'elicitation', action: 'accept', content: { name: 'Ada' } }),
});

const told = {};
for (const name of ['plain', 'count', 'ask', 'fail']) {
    const execution = await session.callTool(name, {});
    const { outcome } = await execution.settle();
    const result = resultFromTaskOutcome(outcome);
    told[name] = [execution.kind, result.content[0].text, result.isError ?? false];
}
const held = await session.callTool('wait', {});
await held.cancel();
told.wait = (await held.settle().then(({ outcome }) => outcome.kind ?? outcome.status, (error) => error.name));
console.log(JSON.stringify({ capabilities: session.capabilities, told }));
await session.close();
await client.close();
