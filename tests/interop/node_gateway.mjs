// The official TypeScript SDK's client before a gateway.
//
//     node tests/interop/node_gateway.mjs legacy|modern URL
//
// CALLS is a list of [TOOL, ARGUMENTS, TEXT]. Prints a line of JSON for each call: its tool, and what went wrong, or
// nothing. TRIMCP_NODE_CLIENT names the node_modules folder with the client.

import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const entry = join(process.env.TRIMCP_NODE_CLIENT, '@modelcontextprotocol', 'client', 'dist', 'index.mjs');
const { Client, StreamableHTTPClientTransport } = await import(pathToFileURL(entry));

const [era, url] = process.argv.slice(2);
const versionNegotiation = { mode: era === 'modern' ? { pin: '2026-07-28' } : 'legacy' };
const client = new Client({ name: 'node', version: '1' }, { versionNegotiation });
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
const listed = new Set((await client.listTools()).tools.map((tool) => tool.name));
for (const [name, args, text] of JSON.parse(process.env.CALLS)) {
    let error = '';
    try {
        const result = await client.callTool({ name, arguments: args });
        const found = JSON.stringify(result.content);
        if (!found.includes(text)) error = `found ${found}`;
        else if (!listed.has(name)) error = 'it is not listed';
    } catch (failure) {
        error = `${failure}`;
    }
    console.log(JSON.stringify({ scenario: name, error }));
}
await client.close();
