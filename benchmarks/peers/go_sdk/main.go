// The measured tools on the official Go SDK.
//
//	go-sdk stdio | http [--reply json|sse] | sse
//	go-sdk memory COUNT UNDER_WAY | client REVISION TARGET...
//
// `http` serves both eras at once: 2025-11-25 with sessions, and 2026-07-28 by a handler without, as the SDK wants it.
// Over a network the first line of output is the URL.
package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

type said struct {
	Text string `json:"text"`
}

type pair struct {
	A int `json:"a"`
	B int `json:"b"`
}

type upTo struct {
	N int `json:"n"`
}

func text(s string) *mcp.CallToolResult {
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: s}}}
}

func echo(ctx context.Context, r *mcp.CallToolRequest, in said) (*mcp.CallToolResult, any, error) {
	return text(in.Text), nil, nil
}

func add(ctx context.Context, r *mcp.CallToolRequest, in pair) (*mcp.CallToolResult, any, error) {
	return text(strconv.Itoa(in.A + in.B)), nil, nil
}

func stream(ctx context.Context, r *mcp.CallToolRequest, in upTo) (*mcp.CallToolResult, any, error) {
	token := r.Params.GetProgressToken()
	for n := 1; token != nil && n <= in.N; n++ {
		step := &mcp.ProgressNotificationParams{ProgressToken: token, Progress: float64(n), Total: float64(in.N)}
		if err := r.Session.NotifyProgress(ctx, step); err != nil {
			return nil, nil, err
		}
	}
	return text("done"), nil, nil
}

// withChanges lets clients subscribe, and offers a tool after which they are told that the resource has changed.
func withChanges() *mcp.Server {
	options := &mcp.ServerOptions{
		SubscribeHandler:   func(context.Context, *mcp.SubscribeRequest) error { return nil },
		UnsubscribeHandler: func(context.Context, *mcp.UnsubscribeRequest) error { return nil },
	}
	server := mcp.NewServer(implementation, options)
	change := func(ctx context.Context, r *mcp.CallToolRequest, in struct{}) (*mcp.CallToolResult, any, error) {
		err := server.ResourceUpdated(ctx, &mcp.ResourceUpdatedNotificationParams{URI: "bench://greeting"})
		return text("changed"), nil, err
	}
	mcp.AddTool(server, &mcp.Tool{Name: "change", Description: "Tell of a change."}, change)
	return server
}

var implementation = &mcp.Implementation{Name: "bench", Version: "1.0"}

func makeServer() *mcp.Server {
	server := mcp.NewServer(implementation, nil)
	if os.Getenv("BENCH_CHANGES") != "" {
		server = withChanges()
	}
	mcp.AddTool(server, &mcp.Tool{Name: "echo", Description: "Return the text."}, echo)
	mcp.AddTool(server, &mcp.Tool{Name: "add", Description: "Return the sum."}, add)
	mcp.AddTool(server, &mcp.Tool{Name: "stream", Description: "Report every number on the way."}, stream)
	more, _ := strconv.Atoi(os.Getenv("BENCH_TOOLS"))
	for n := range more {
		mcp.AddTool(server, &mcp.Tool{Name: fmt.Sprintf("tool_%d", n), Description: "Return the text; one tool of many."}, echo)
	}
	server.AddResource(&mcp.Resource{URI: "bench://greeting", Name: "greeting", Description: "A greeting."},
		func(ctx context.Context, r *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: r.Params.URI, Text: "hello"}}}, nil
		})
	greet := &mcp.Prompt{
		Name: "greet", Description: "Ask for a greeting.", Arguments: []*mcp.PromptArgument{{Name: "name", Required: true}},
	}
	server.AddPrompt(greet, func(ctx context.Context, r *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) {
		content := &mcp.TextContent{Text: "Say hello to " + r.Params.Arguments["name"] + "."}
		return &mcp.GetPromptResult{Messages: []*mcp.PromptMessage{{Role: "user", Content: content}}}, nil
	})
	return server
}

func serve(mode string, words []string) error {
	server := makeServer()
	if mode == "stdio" {
		return server.Run(context.Background(), &mcp.StdioTransport{})
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	get := func(*http.Request) *mcp.Server { return server }
	if mode == "sse" {
		fmt.Printf("http://%s/sse\n", listener.Addr())
		return http.Serve(listener, mcp.NewSSEHandler(get, nil))
	}
	json := slices.Contains(words, "json")
	sessions := mcp.NewStreamableHTTPHandler(get, &mcp.StreamableHTTPOptions{JSONResponse: json})
	modern := mcp.NewStreamableHTTPHandler(get, &mcp.StreamableHTTPOptions{JSONResponse: json, Stateless: true})
	fmt.Printf("http://%s/mcp\n", listener.Addr())
	return http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("MCP-Protocol-Version") >= "2026" {
			modern.ServeHTTP(w, r)
		} else {
			sessions.ServeHTTP(w, r)
		}
	}))
}

func main() {
	run := serve
	switch os.Args[1] {
	case "memory":
		run = inMemory
	case "client":
		run = byClient
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
