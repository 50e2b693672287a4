import io.modelcontextprotocol.client.McpClient;
import io.modelcontextprotocol.client.McpSyncClient;
import io.modelcontextprotocol.client.transport.HttpClientSseClientTransport;
import io.modelcontextprotocol.client.transport.HttpClientStreamableHttpTransport;
import io.modelcontextprotocol.client.transport.ServerParameters;
import io.modelcontextprotocol.client.transport.StdioClientTransport;
import io.modelcontextprotocol.json.McpJsonDefaults;
import io.modelcontextprotocol.json.McpJsonMapper;
import io.modelcontextprotocol.server.McpServer;
import io.modelcontextprotocol.server.McpServerFeatures;
import io.modelcontextprotocol.server.McpSyncServerExchange;
import io.modelcontextprotocol.server.transport.HttpServletSseServerTransportProvider;
import io.modelcontextprotocol.server.transport.HttpServletStreamableServerTransportProvider;
import io.modelcontextprotocol.server.transport.StdioServerTransportProvider;
import io.modelcontextprotocol.spec.McpClientTransport;
import io.modelcontextprotocol.spec.McpSchema;
import jakarta.servlet.http.HttpServlet;
import java.net.URI;
import java.time.Duration;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BiFunction;
import org.apache.catalina.Context;
import org.apache.catalina.startup.Tomcat;

/**
 * A server and a client on the official Java SDK, for the interop tests.
 *
 * <pre>
 * serve stdio|http|sse           serve; over HTTP print where
 * call http|sse URL              carry out the scenarios, and print a line of JSON for each
 * call stdio COMMAND ARGUMENT...
 * </pre>
 */
public class Peer {

    static final McpJsonMapper JSON = McpJsonDefaults.getMapper();

    public static void main(String[] words) throws Exception {
        List<String> rest = Arrays.asList(words).subList(2, words.length);
        if (words[0].equals("serve")) {
            serve(words[1]);
        } else {
            call(words[1], rest);
            System.exit(0);
        }
    }

    // The server

    static McpServerFeatures.SyncToolSpecification tool(String name, String schema,
            BiFunction<McpSyncServerExchange, McpSchema.CallToolRequest, McpSchema.CallToolResult> handler)
            throws Exception {
        Map<String, Object> tool = new LinkedHashMap<>();
        tool.put("name", name);
        tool.put("inputSchema", JSON.readValue(schema, Map.class));
        McpSchema.Tool listed = JSON.convertValue(tool, McpSchema.Tool.class);
        return McpServerFeatures.SyncToolSpecification.builder().tool(listed).callHandler(handler).build();
    }

    static McpSchema.CallToolResult result(String text, boolean error) {
        return McpSchema.CallToolResult.builder().addTextContent(text).isError(error).build();
    }

    static List<McpServerFeatures.SyncToolSpecification> tools() throws Exception {
        String none = "{\"type\":\"object\"}";
        return List.of(
                tool("add", none, (exchange, request) -> {
                    int total = ((Number) request.arguments().get("a")).intValue()
                            + ((Number) request.arguments().get("b")).intValue();
                    return result("" + total, false);
                }),
                tool("echo", none, (exchange, request) -> result("" + request.arguments().get("text"), false)),
                tool("count", none, (exchange, request) -> {
                    int to = ((Number) request.arguments().get("to")).intValue();
                    for (int n = 1; n <= to; n++) {
                        Object token = request.meta() == null ? null : request.meta().get("progressToken");
                        if (token != null) {
                            exchange.progressNotification(
                                    new McpSchema.ProgressNotification(token, (double) n, (double) to, null));
                        }
                    }
                    return result("done", false);
                }),
                tool("fail", none, (exchange, request) -> result("no luck today", true)));
    }

    static McpServerFeatures.SyncResourceSpecification greeting() throws Exception {
        McpSchema.Resource listed = JSON.readValue("{\"uri\":\"peer://greeting\",\"name\":\"greeting\"}",
                McpSchema.Resource.class);
        return new McpServerFeatures.SyncResourceSpecification(listed, (exchange, request) ->
                new McpSchema.ReadResourceResult(
                        List.of(new McpSchema.TextResourceContents(request.uri(), "text/plain", "hello"))));
    }

    static McpServerFeatures.SyncPromptSpecification review() throws Exception {
        McpSchema.Prompt listed = JSON.readValue(
                "{\"name\":\"review\",\"arguments\":[{\"name\":\"path\",\"required\":true}]}", McpSchema.Prompt.class);
        return new McpServerFeatures.SyncPromptSpecification(listed, (exchange, request) ->
                new McpSchema.GetPromptResult(null, List.of(new McpSchema.PromptMessage(McpSchema.Role.USER,
                        new McpSchema.TextContent("Please review " + request.arguments().get("path") + ".")))));
    }

    static void serve(String transport) throws Exception {
        McpSchema.ServerCapabilities can = McpSchema.ServerCapabilities.builder()
                .tools(true).resources(false, true).prompts(true).build();
        HttpServlet servlet = null;
        if (transport.equals("stdio")) {
            McpServer.sync(new StdioServerTransportProvider(JSON)).serverInfo("java", "1.0").capabilities(can)
                    .tools(tools()).resources(greeting()).prompts(review()).build();
            new CountDownLatch(1).await();
        } else if (transport.equals("sse")) {
            HttpServletSseServerTransportProvider provider =
                    HttpServletSseServerTransportProvider.builder().messageEndpoint("/message").build();
            McpServer.sync(provider).serverInfo("java", "1.0").capabilities(can)
                    .tools(tools()).resources(greeting()).prompts(review()).build();
            servlet = provider;
        } else {
            HttpServletStreamableServerTransportProvider provider =
                    HttpServletStreamableServerTransportProvider.builder().mcpEndpoint("/mcp").build();
            McpServer.sync(provider).serverInfo("java", "1.0").capabilities(can)
                    .tools(tools()).resources(greeting()).prompts(review()).build();
            servlet = provider;
        }
        Tomcat tomcat = new Tomcat();
        tomcat.setBaseDir(java.nio.file.Files.createTempDirectory("peer").toString());
        tomcat.setHostname("127.0.0.1");
        tomcat.setPort(0);
        Context context = tomcat.addContext("", null);
        Tomcat.addServlet(context, "mcp", servlet).setAsyncSupported(true);
        context.addServletMappingDecoded("/*", "mcp");
        tomcat.getConnector();
        tomcat.start();
        System.out.println("http://127.0.0.1:" + tomcat.getConnector().getLocalPort());
        tomcat.getServer().await();
    }

    // The client

    static final AtomicInteger STEPS = new AtomicInteger();

    static String ask(McpSyncClient client, String name, Map<String, Object> arguments) {
        Map<String, Object> meta = name.equals("count") ? Map.of("progressToken", "steps") : Map.of();
        McpSchema.CallToolResult found = client.callTool(
                meta.isEmpty() ? new McpSchema.CallToolRequest(name, arguments)
                        : new McpSchema.CallToolRequest(name, arguments, meta));
        StringBuilder text = new StringBuilder();
        for (McpSchema.Content block : found.content()) {
            if (block instanceof McpSchema.TextContent said) {
                text.append(said.text());
            }
        }
        return (Boolean.TRUE.equals(found.isError()) ? "error: " : "") + text;
    }

    static String check(Object found, Object wanted) {
        return wanted.equals(found) ? "" : "found " + String.valueOf(found);
    }

    static void call(String kind, List<String> rest) throws Exception {
        McpClientTransport transport;
        if (kind.equals("stdio")) {
            transport = new StdioClientTransport(ServerParameters.builder(rest.get(0))
                    .args(rest.subList(1, rest.size())).build(), JSON);
        } else {
            URI url = URI.create(rest.get(0));
            String base = "http://" + url.getAuthority();
            transport = kind.equals("sse")
                    ? HttpClientSseClientTransport.builder(base).sseEndpoint(url.getPath()).build()
                    : HttpClientStreamableHttpTransport.builder(base).endpoint(url.getPath()).build();
        }
        McpSyncClient client = McpClient.sync(transport).requestTimeout(Duration.ofSeconds(20))
                .capabilities(McpSchema.ClientCapabilities.builder().roots(true).sampling().elicitation().build())
                .roots(new McpSchema.Root("file:///srv", "srv"))
                .sampling(request -> McpSchema.CreateMessageResult.builder().role(McpSchema.Role.ASSISTANT)
                        .message("because").model("m").stopReason(McpSchema.CreateMessageResult.StopReason.END_TURN)
                        .build())
                .elicitation(request -> new McpSchema.ElicitResult(McpSchema.ElicitResult.Action.ACCEPT,
                        Map.of("name", "Ada", "colour", "Ada")))
                .progressConsumer(step -> STEPS.incrementAndGet())
                .build();
        client.initialize();
        Map<String, Callable<String>> scenarios = new LinkedHashMap<>();
        scenarios.put("tools", () -> check(
                client.listTools().tools().stream().anyMatch(tool -> tool.name().equals("greet")), true));
        scenarios.put("echo", () -> check(ask(client, "echo", Map.of("text", "gr\u00fc\u00dfe\u2028")),
                "gr\u00fc\u00dfe\u2028"));
        scenarios.put("structured", () -> check(ask(client, "add", Map.of("a", 2, "b", 3)).contains("5"), true));
        scenarios.put("progress", () -> {
            String done = check(ask(client, "count", Map.of("to", 5)), "done");
            for (int i = 0; i < 100 && STEPS.get() < 5; i++) {
                Thread.sleep(20);
            }
            return done + check(STEPS.get(), 5);
        });
        scenarios.put("tool error", () -> check(ask(client, "fail", Map.of()), "error: no luck today"));
        scenarios.put("large", () -> check(ask(client, "large", Map.of("size", 1_000_000)).length(), 1_000_000));
        scenarios.put("questions", () -> check(ask(client, "greet", Map.of()), "Ada likes Ada"));
        scenarios.put("sampling", () -> check(ask(client, "think", Map.of("question", "Why?")), "m says because"));
        scenarios.put("roots", () -> check(ask(client, "places", Map.of()).contains("file:///srv"), true));
        scenarios.put("resource", () -> check(((McpSchema.TextResourceContents) client.readResource(
                new McpSchema.ReadResourceRequest("interop://greeting")).contents().get(0)).text(), "hello"));
        scenarios.put("prompt", () -> check(((McpSchema.TextContent) client.getPrompt(
                new McpSchema.GetPromptRequest("review", Map.of("path", "setup.py"))).messages().get(0).content())
                .text(), "Please review setup.py."));
        scenarios.put("many", () -> {
            var pool = Executors.newFixedThreadPool(20);
            try {
                List<Callable<String>> calls = new java.util.ArrayList<>();
                for (int n = 0; n < 50; n++) {
                    String text = "" + n;
                    calls.add(() -> check(ask(client, "echo", Map.of("text", text)), text));
                }
                StringBuilder wrong = new StringBuilder();
                for (var done : pool.invokeAll(calls)) {
                    wrong.append(done.get());
                }
                return wrong.toString();
            } finally {
                pool.shutdownNow();
            }
        });
        for (var each : scenarios.entrySet()) {
            String error;
            try {
                error = each.getValue().call();
            } catch (Throwable thrown) {
                error = String.valueOf(thrown);
            }
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("scenario", each.getKey());
            line.put("error", error);
            System.out.println(JSON.writeValueAsString(line));
        }
        client.closeGracefully();
    }
}
