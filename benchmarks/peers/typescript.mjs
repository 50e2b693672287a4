// The measured tools on the official TypeScript SDK, from the `node_modules` folder that BENCH_NODE_MODULES names.
//
//     typescript.mjs stdio | sse | http [--reply json|sse|auto] | memory COUNT UNDER_WAY | client REVISION TARGET...
//
// `http` serves both eras at once: 2025-11-25 with sessions, as the SDK's guide "Sessions, state, and scaling" shows,
// and 2026-07-28 as its guide "Serve over HTTP" does, on plain node:http with the guards it recommends.
import { randomUUID } from "node:crypto";
import { createRequire } from "node:module";

const require = createRequire(process.env.BENCH_NODE_MODULES + "/");
const { McpServer } = require("@modelcontextprotocol/server");
const z = require("zod/v4");

const [mode, ...words] = process.argv.slice(2);
const reply = words.includes("--reply") ? words[words.indexOf("--reply") + 1] : "sse";
const bodies = process.env.BENCH_MAX_MESSAGE ? Number(process.env.BENCH_MAX_MESSAGE) : undefined;
const more = Array.from({ length: Number(process.env.BENCH_TOOLS ?? 0) }, (_, number) => `tool_${number}`);

// Made once: over HTTP the SDK wants a server for each request, made of what is there already.
const echo = { description: "Return the text.", inputSchema: z.object({ text: z.string() }) };
const add = { description: "Return the sum.", inputSchema: z.object({ a: z.number().int(), b: z.number().int() }) };
const stream = { description: "Report every number on the way.", inputSchema: z.object({ n: z.number().int() }) };
const nothing = { description: "Return the text; one tool of many.", inputSchema: z.object({ text: z.string() }) };
const counts = { description: "Return what the heap holds, after a collection of garbage.", inputSchema: z.object({}) };
const greet = { description: "Ask for a greeting.", argsSchema: z.object({ name: z.string() }) };

const said = (text) => ({ content: [{ type: "text", text }] });

function build() {
  const server = new McpServer({ name: "bench", version: "1.0" });
  server.registerTool("echo", echo, async ({ text }) => said(text));
  server.registerTool("add", add, async ({ a, b }) => said(String(a + b)));
  server.registerTool("stream", stream, async ({ n }, ctx) => {
    const progressToken = ctx.mcpReq._meta?.progressToken;
    if (progressToken !== undefined) {
      for (let progress = 1; progress <= n; progress++) {
        await ctx.mcpReq.notify({ method: "notifications/progress", params: { progressToken, progress, total: n } });
      }
    }
    return said("done");
  });
  for (const name of more) server.registerTool(name, nothing, async ({ text }) => said(text));
  if (process.env.BENCH_COUNTS) {
    server.registerTool("counts", counts, async () => {
      globalThis.gc?.();
      return said(`${process.memoryUsage().heapUsed} 0 0`);
    });
  }
  server.registerResource("greeting", "bench://greeting", { description: "A greeting." }, async (uri) => ({
    contents: [{ uri: uri.href, text: "hello" }],
  }));
  server.registerPrompt("greet", greet, ({ name }) => ({
    messages: [{ role: "user", content: { type: "text", text: `Say hello to ${name}.` } }],
  }));
  return server;
}

function overStdio() {
  const { serveStdio, StdioServerTransport } = require("@modelcontextprotocol/server/stdio");
  const large = { maxBufferSize: 2 * bodies };
  const options = bodies ? { transport: new StdioServerTransport(process.stdin, process.stdout, large) } : {};
  serveStdio(build, options);
}

function listen(path, handle) {
  const { createServer } = require("node:http");
  const { localhostHostValidation, localhostOriginValidation } = require("@modelcontextprotocol/node");
  const validateHost = localhostHostValidation();
  const validateOrigin = localhostOriginValidation();
  const listener = createServer((req, res) => {
    if (!validateHost(req, res) || !validateOrigin(req, res)) return;
    void handle(req, res);
  });
  // A client may be idle between two measurements for longer than the usual five seconds.
  listener.keepAliveTimeout = 75_000;
  listener.listen({ port: 0, host: "127.0.0.1", backlog: 2048 }, () => {
    console.log(`http://127.0.0.1:${listener.address().port}${path}`);
  });
}

function refuse(res, status, code, message) {
  res.writeHead(status, { "content-type": "application/json" });
  res.end(JSON.stringify({ jsonrpc: "2.0", error: { code, message }, id: null }));
}

function overHttp() {
  const { createMcpHandler } = require("@modelcontextprotocol/server");
  const { NodeStreamableHTTPServerTransport, toNodeHandler } = require("@modelcontextprotocol/node");
  const size = bodies ? { maxRequestBodySize: bodies } : {};
  const modern = toNodeHandler(createMcpHandler(build, { legacy: "reject", responseMode: reply, ...size }), size);
  const sessions = new Map();

  listen("/mcp", async (req, res) => {
    const id = req.headers["mcp-session-id"];
    if (id !== undefined) {
      const transport = sessions.get(id);
      return transport ? transport.handleRequest(req, res) : refuse(res, 404, -32001, "Session not found");
    }
    // Both eras say so in a header, except for `initialize`: cheaper than to look into each body.
    if ((req.headers["mcp-protocol-version"] ?? "") >= "2026") return modern(req, res);
    const transport = new NodeStreamableHTTPServerTransport({
      sessionIdGenerator: () => randomUUID(),
      enableJsonResponse: reply === "json",
      onsessioninitialized: (id) => void sessions.set(id, transport),
      ...size,
    });
    transport.onclose = () => void (transport.sessionId && sessions.delete(transport.sessionId));
    await build().connect(transport);
    return transport.handleRequest(req, res);
  });
}

function overSse() {
  const { SSEServerTransport } = require("@modelcontextprotocol/server-legacy/sse");
  const sessions = new Map();

  listen("/sse", async (req, res) => {
    if (req.method === "GET") {
      const transport = new SSEServerTransport("/messages", res);
      sessions.set(transport.sessionId, transport);
      res.on("close", () => sessions.delete(transport.sessionId));
      return build().connect(transport);
    }
    const transport = sessions.get(req.url.split("sessionId=")[1]);
    if (!transport) return refuse(res, 404, -32001, "Session not found");
    return transport.handlePostMessage(req, res, bodies ? await whole(req) : undefined);
  });
}

async function whole(req) {
  const chunks = [];
  for await (const chunk of req) chunks.push(chunk);
  return JSON.parse(Buffer.concat(chunks).toString());
}

// Calls `echo` for each number, so many at a time; returns seconds of CPU and on the clock, and latencies in ms.
async function turn(client, numbers, underWay) {
  const took = [];
  async function caller() {
    for (const number of numbers) {
      const text = `hello ${number}`;
      const began = performance.now();
      const result = await client.callTool({ name: "echo", arguments: { text } });
      took.push(performance.now() - began);
      if (result.content[0].text !== text) throw new Error(JSON.stringify(result));
    }
  }
  const before = process.cpuUsage();
  const began = performance.now();
  await Promise.all(Array.from({ length: underWay }, caller));
  const wall = (performance.now() - began) / 1e3;
  const { user, system } = process.cpuUsage(before);
  took.sort((one, other) => one - other);
  const share = (percent) => took[Math.ceil((took.length * percent) / 100) - 1];
  const latency = { p50: share(50), p99: share(99), "p99.9": share(99.9) };
  return { calls: took.length, cpu: (user + system) / 1e6, wall, ...latency };
}

// For each number less than `most`; without it until the time is over.
function* numbers(most, seconds = Infinity) {
  const end = performance.now() + seconds * 1e3;
  for (let number = 0; number < most && performance.now() <= end; number++) yield number;
}

async function inMemory(count, underWay) {
  const { Client, InMemoryTransport } = require("@modelcontextprotocol/client");
  const [near, far] = InMemoryTransport.createLinkedPair();
  const client = new Client({ name: "bench", version: "1.0" });
  await Promise.all([build().connect(far), client.connect(near)]);
  await turn(client, numbers(Math.floor(count / 8)), underWay);
  const { wall, cpu } = await turn(client, numbers(count), underWay);
  console.log(wall, cpu);
  await client.close();
}

async function byClient(revision, target) {
  const { Client, StreamableHTTPClientTransport } = require("@modelcontextprotocol/client");
  const { StdioClientTransport } = require("@modelcontextprotocol/client/stdio");
  const { createInterface } = require("node:readline");
  const [command, ...args] = target;
  const mode = revision < "2026" ? "legacy" : { pin: revision };
  const client = new Client({ name: "bench", version: "1.0" }, { versionNegotiation: { mode } });
  const overHttp = target.length === 1;
  await client.connect(
    overHttp ? new StreamableHTTPClientTransport(new URL(command)) : new StdioClientTransport({ command, args }),
  );
  console.log("ready");
  for await (const line of createInterface({ input: process.stdin })) {
    const [amount, underWay] = line.split(" ");
    const some = amount.endsWith("x") ? numbers(parseInt(amount)) : numbers(Infinity, Number(amount));
    console.log(JSON.stringify(await turn(client, some, Number(underWay))));
  }
  await client.close();
}

if (mode === "stdio") overStdio();
else if (mode === "http") overHttp();
else if (mode === "sse") overSse();
else if (mode === "client") await byClient(words[0], words.slice(1));
else await inMemory(Number(words[0]), Number(words[1]));
