// What the official package for apps makes of our server, through the official TypeScript SDK's client.
//
//     node tests/interop/node_apps.mjs legacy|modern URL
//
// Prints one object of JSON. TRIMCP_NODE_APPS names the node_modules folder with both.

import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const load = (...path) => import(pathToFileURL(join(process.env.TRIMCP_NODE_APPS, '@modelcontextprotocol', ...path)));
const { Client, StreamableHTTPClientTransport } = await load('client', 'dist', 'index.mjs');
const apps = await load('ext-apps', 'dist', 'src', 'app-bridge.js');

const [era, url] = process.argv.slice(2);
const extensions = { 'io.modelcontextprotocol/ui': { mimeTypes: [apps.RESOURCE_MIME_TYPE] } };
const versionNegotiation = { mode: era === 'modern' ? { pin: '2026-07-28' } : 'legacy' };
const client = new Client({ name: 'node-apps', version: '1' }, { capabilities: { extensions }, versionNegotiation });
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
const { tools } = await client.listTools();
const told = {};
for (const tool of tools) {
    told[tool.name] = [apps.getToolUiResourceUri(tool) ?? null, apps.isToolVisibilityAppOnly(tool)];
}
const { contents } = await client.readResource({ uri: told.batch[0] });
const { structuredContent } = await client.callTool({ name: 'job_progress', arguments: {} });
console.log(
    JSON.stringify({
        declared: client.getServerCapabilities().extensions,
        told,
        page: contents[0].mimeType === apps.RESOURCE_MIME_TYPE,
        meta: contents[0]._meta,
        jobs: structuredContent.result,
    }),
);
await client.close();
