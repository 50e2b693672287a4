// The measured tools on the official TypeScript SDK, over stdio, from the `node_modules` folder that BENCH_NODE_MODULES names.
import { createRequire } from "node:module";

const require = createRequire(process.env.BENCH_NODE_MODULES + "/");
const { McpServer } = require("@modelcontextprotocol/server");
const { serveStdio } = require("@modelcontextprotocol/server/stdio");
const { z } = require("zod");

serveStdio(() => {
  const server = new McpServer({ name: "echo", version: "1.0" });
  const echo = { description: "Return the text.", inputSchema: z.object({ text: z.string() }) };
  server.registerTool("echo", echo, async ({ text }) => ({ content: [{ type: "text", text }] }));
  const count = { description: "Report every number on the way.", inputSchema: z.object({ to: z.number().int() }) };
  server.registerTool("count", count, async ({ to }, ctx) => {
    const progressToken = ctx.mcpReq._meta?.progressToken;
    for (let progress = 1; progress <= to; progress++) {
      await ctx.mcpReq.notify({ method: "notifications/progress", params: { progressToken, progress, total: to } });
    }
    return { content: [{ type: "text", text: "done" }] };
  });
  return server;
});
