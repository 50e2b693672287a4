// The official TypeScript SDK's client calls a tool, again whenever a line comes on its standard input.
//
//     node tests/interop/node_between_kills.mjs legacy|modern URL
//
// Prints the text of each result on a line. Ends with its standard input. TRIMCP_NODE_CLIENT names the node_modules folder.

import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const entry = join(process.env.TRIMCP_NODE_CLIENT, '@modelcontextprotocol', 'client', 'dist', 'index.mjs');
const { Client, StreamableHTTPClientTransport } = await import(pathToFileURL(entry));

const [era, url] = process.argv.slice(2);
const versionNegotiation = { mode: era === 'modern' ? { pin: '2026-07-28' } : 'legacy' };
const client = new Client({ name: 'node', version: '1' }, { versionNegotiation });
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
console.log('connected');
for await (const _ of createInterface({ input: process.stdin })) {
    const result = await client.callTool({ name: 'count', arguments: { to: 3, pause: 0.01 } });
    console.log(result.content[0].text);
}
await client.close();
