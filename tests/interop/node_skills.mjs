// The official TypeScript SDK's skills, as a server of a folder or as a client of one server.
//
//     node tests/interop/node_skills.mjs serve FOLDER
//     node tests/interop/node_skills.mjs read URL URI
//
// The server prints its address. The client prints what it found and verified as JSON. TRIMCP_NODE_SKILLS names the
// node_modules folder with the SDK's packages.

import { createServer } from 'node:http';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const load = (...path) => import(pathToFileURL(join(process.env.TRIMCP_NODE_SKILLS, '@modelcontextprotocol', ...path)));
const [verb, ...rest] = process.argv.slice(2);

async function serve(folder) {
    const { McpServer, createMcpHandler } = await load('server', 'dist', 'index.mjs');
    const { loadSkills } = await load('server', 'dist', 'ext', 'skills', 'node.mjs');
    const { toNodeHandler } = await load('node', 'dist', 'index.mjs');
    const catalog = await loadSkills(folder, { strict: true });
    const build = () => {
        const server = new McpServer({ name: 'skills', version: '1' });
        catalog.attach(server);
        return server;
    };
    const http = createServer(toNodeHandler(createMcpHandler(build)));
    http.listen(0, '127.0.0.1', () => console.log(`http://127.0.0.1:${http.address().port}/mcp`));
    process.once('SIGTERM', () => process.exit(0));
}

async function read(url, uri) {
    const { Client, StreamableHTTPClientTransport } = await load('client', 'dist', 'index.mjs');
    const { SkillsClient } = await load('client', 'dist', 'ext', 'skills', 'index.mjs');
    const pin = { mode: { pin: '2026-07-28' } };
    const client = new Client({ name: 'skills', version: '1' }, { versionNegotiation: pin });
    await client.connect(new StreamableHTTPClientTransport(new URL(url)));
    const skills = new SkillsClient(client);
    const listed = (await skills.list()).skills.map((skill) => skill.uri);
    const { skill } = await skills.get(uri);
    const root = uri.slice(0, uri.lastIndexOf('/') + 1);
    const files = {};
    for (const { uri: file } of skill.resources) {
        const found = await skills.read(skill, file);
        if (!found.verified) throw new Error(`${file} was not verified`);
        files[decodeURIComponent(file.slice(root.length))] = found.bytes.length;
    }
    console.log(JSON.stringify([client.getNegotiatedProtocolVersion(), listed, files]));
    await client.close();
}

await (verb === 'serve' ? serve : read)(...rest);
