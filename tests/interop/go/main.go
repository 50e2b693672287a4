// A server and a client on the official Go SDK, for the interop tests.
//
//	peer serve stdio|http|stateless|sse [REVISION ...]    serve; over HTTP print where
//	peer call http|http2|sse URL [REVISION]     carry out the scenarios, and print a line of JSON for each
//	peer call stdio COMMAND ARGUMENT ...
//
// With the environment variable CALLS, a list of [TOOL, ARGUMENTS, TEXT], a client makes these calls instead, and looks
// for the texts in their results.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

type pair struct {
	A int `json:"a"`
	B int `json:"b"`
}

type sum struct {
	Total int `json:"total"`
}

type said struct {
	Text string `json:"text"`
}

type upTo struct {
	To int `json:"to"`
}

type nothing struct{}

func text(s string) *mcp.CallToolResult {
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: s}}}
}

func makeServer(revisions []string) *mcp.Server {
	options := &mcp.ServerOptions{Instructions: "Ask for anything.", SupportedProtocolVersions: revisions}
	server := mcp.NewServer(&mcp.Implementation{Name: "go", Version: "1.0"}, options)
	mcp.AddTool(server, &mcp.Tool{Name: "add"},
		func(ctx context.Context, r *mcp.CallToolRequest, in pair) (*mcp.CallToolResult, sum, error) {
			return nil, sum{in.A + in.B}, nil
		})
	mcp.AddTool(server, &mcp.Tool{Name: "echo"},
		func(ctx context.Context, r *mcp.CallToolRequest, in said) (*mcp.CallToolResult, any, error) {
			return text(in.Text), nil, nil
		})
	mcp.AddTool(server, &mcp.Tool{Name: "count"},
		func(ctx context.Context, r *mcp.CallToolRequest, in upTo) (*mcp.CallToolResult, any, error) {
			for n := 1; n <= in.To; n++ {
				step := &mcp.ProgressNotificationParams{
					ProgressToken: r.Params.GetProgressToken(), Progress: float64(n), Total: float64(in.To),
				}
				if err := r.Session.NotifyProgress(ctx, step); err != nil {
					return nil, nil, err
				}
			}
			return text("done"), nil, nil
		})
	mcp.AddTool(server, &mcp.Tool{Name: "fail"},
		func(ctx context.Context, r *mcp.CallToolRequest, in nothing) (*mcp.CallToolResult, any, error) {
			return nil, nil, fmt.Errorf("no luck today")
		})
	server.AddResource(&mcp.Resource{URI: "peer://greeting", Name: "greeting"},
		func(ctx context.Context, r *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
			return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: r.Params.URI, Text: "hello"}}}, nil
		})
	server.AddPrompt(&mcp.Prompt{Name: "review", Arguments: []*mcp.PromptArgument{{Name: "path", Required: true}}},
		func(ctx context.Context, r *mcp.GetPromptRequest) (*mcp.GetPromptResult, error) {
			message := &mcp.PromptMessage{
				Role: "user", Content: &mcp.TextContent{Text: "Please review " + r.Params.Arguments["path"] + "."},
			}
			return &mcp.GetPromptResult{Messages: []*mcp.PromptMessage{message}}, nil
		})
	return server
}

func serve(transport string, revisions []string) error {
	server := makeServer(revisions)
	if transport == "stdio" {
		return server.Run(context.Background(), &mcp.StdioTransport{})
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	get := func(*http.Request) *mcp.Server { return server }
	// Without sessions it serves 2026-07-28 too; with them it does not.
	options := &mcp.StreamableHTTPOptions{Stateless: transport == "stateless"}
	var handler http.Handler = mcp.NewStreamableHTTPHandler(get, options)
	if transport == "sse" {
		handler = mcp.NewSSEHandler(get, nil)
	}
	fmt.Printf("http://%s\n", listener.Addr())
	return http.Serve(listener, handler)
}

// The client

var steps = struct {
	sync.Mutex
	count int
}{}

func check(ok bool, found any) error {
	if ok {
		return nil
	}
	return fmt.Errorf("found %v", found)
}

func call(ctx context.Context, s *mcp.ClientSession, name string, arguments any) (string, *mcp.CallToolResult, error) {
	params := &mcp.CallToolParams{Name: name, Arguments: arguments}
	if name == "count" {
		params.SetProgressToken("steps")
	}
	result, err := s.CallTool(ctx, params)
	if err != nil {
		return "", nil, err
	}
	var all []string
	for _, block := range result.Content {
		if t, ok := block.(*mcp.TextContent); ok {
			all = append(all, t.Text)
		}
	}
	return strings.Join(all, " "), result, nil
}

var scenarios = []struct {
	name string
	run  func(context.Context, *mcp.ClientSession) error
}{
	{"tools", func(ctx context.Context, s *mcp.ClientSession) error {
		found := map[string]bool{}
		for tool, err := range s.Tools(ctx, nil) {
			if err != nil {
				return err
			}
			found[tool.Name] = true
		}
		return check(found["echo"] && found["greet"], found)
	}},
	{"echo", func(ctx context.Context, s *mcp.ClientSession) error {
		found, _, err := call(ctx, s, "echo", said{"grüße\u2028"})
		if err != nil {
			return err
		}
		return check(found == "grüße\u2028", found)
	}},
	{"structured", func(ctx context.Context, s *mcp.ClientSession) error {
		found, result, err := call(ctx, s, "add", pair{2, 3})
		if err != nil {
			return err
		}
		total, _ := json.Marshal(result.StructuredContent)
		// Before 2025-06-18 there is the text alone.
		return check(string(total) == `{"total":5}` || (result.StructuredContent == nil && strings.Contains(found, "5")), found)
	}},
	{"progress", func(ctx context.Context, s *mcp.ClientSession) error {
		found, _, err := call(ctx, s, "count", upTo{5})
		if err != nil {
			return err
		}
		for range 100 { // the SDK's handlers run beside the answer
			steps.Lock()
			count := steps.count
			steps.Unlock()
			if count == 5 {
				return check(found == "done", found)
			}
			time.Sleep(20 * time.Millisecond)
		}
		return fmt.Errorf("not all of the progress came")
	}},
	{"tool error", func(ctx context.Context, s *mcp.ClientSession) error {
		found, result, err := call(ctx, s, "fail", nothing{})
		if err != nil {
			return err
		}
		return check(result.IsError && found == "no luck today", found)
	}},
	{"large", func(ctx context.Context, s *mcp.ClientSession) error {
		found, _, err := call(ctx, s, "large", map[string]int{"size": 2_000_000})
		if err != nil {
			return err
		}
		return check(len(found) == 2_000_000, len(found))
	}},
	{"questions", func(ctx context.Context, s *mcp.ClientSession) error {
		found, _, err := call(ctx, s, "greet", nothing{})
		if err != nil {
			return err
		}
		return check(found == "Ada likes Ada", found)
	}},
	{"sampling", func(ctx context.Context, s *mcp.ClientSession) error {
		found, _, err := call(ctx, s, "think", map[string]string{"question": "Why?"})
		if err != nil {
			return err
		}
		return check(found == "m says because", found)
	}},
	{"roots", func(ctx context.Context, s *mcp.ClientSession) error {
		found, _, err := call(ctx, s, "places", nothing{})
		if err != nil {
			return err
		}
		return check(strings.Contains(found, "file:///srv"), found)
	}},
	{"resource", func(ctx context.Context, s *mcp.ClientSession) error {
		result, err := s.ReadResource(ctx, &mcp.ReadResourceParams{URI: "interop://greeting"})
		if err != nil {
			return err
		}
		return check(result.Contents[0].Text == "hello", result.Contents[0].Text)
	}},
	{"prompt", func(ctx context.Context, s *mcp.ClientSession) error {
		arguments := map[string]string{"path": "setup.py"}
		result, err := s.GetPrompt(ctx, &mcp.GetPromptParams{Name: "review", Arguments: arguments})
		if err != nil {
			return err
		}
		found := result.Messages[0].Content.(*mcp.TextContent).Text
		return check(found == "Please review setup.py.", found)
	}},
	{"many", func(ctx context.Context, s *mcp.ClientSession) error {
		failed := make(chan error, 50)
		for n := range 50 {
			go func() {
				found, _, err := call(ctx, s, "echo", said{fmt.Sprint(n)})
				if err == nil {
					err = check(found == fmt.Sprint(n), found)
				}
				failed <- err
			}()
		}
		for range 50 {
			if err := <-failed; err != nil {
				return err
			}
		}
		return nil
	}},
	{"cancel", func(ctx context.Context, s *mcp.ClientSession) error {
		soon, stop := context.WithTimeout(ctx, 300*time.Millisecond)
		defer stop()
		if _, _, err := call(soon, s, "wait_for_ever", map[string]string{"name": "go"}); err == nil {
			return fmt.Errorf("it was answered")
		}
		found, _, err := call(ctx, s, "was_cancelled", map[string]string{"name": "go"})
		if err != nil {
			return err
		}
		return check(found == "stopped", found)
	}},
}

type wanted struct {
	tool      string
	arguments map[string]any
	text      string
}

func (w *wanted) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[]any{&w.tool, &w.arguments, &w.text})
}

func callThese(ctx context.Context, session *mcp.ClientSession, told string) error {
	var calls []wanted
	if err := json.Unmarshal([]byte(told), &calls); err != nil {
		return err
	}
	listed := map[string]bool{}
	for tool, err := range session.Tools(ctx, nil) {
		if err != nil {
			return err
		}
		listed[tool.Name] = true
	}
	for _, call := range calls {
		wrong := ""
		result, err := session.CallTool(ctx, &mcp.CallToolParams{Name: call.tool, Arguments: call.arguments})
		if err != nil {
			wrong = err.Error()
		} else if found, _ := json.Marshal(result.Content); !strings.Contains(string(found), call.text) {
			wrong = "found " + string(found)
		} else if !listed[call.tool] {
			wrong = "it is not listed"
		}
		line, _ := json.Marshal(map[string]string{"scenario": call.tool, "error": wrong})
		fmt.Println(string(line))
	}
	return session.Close()
}

func callAll(transport mcp.Transport, revision string) error {
	client := mcp.NewClient(&mcp.Implementation{Name: "go", Version: "1.0"}, &mcp.ClientOptions{
		ElicitationHandler: func(ctx context.Context, r *mcp.ElicitRequest) (*mcp.ElicitResult, error) {
			return &mcp.ElicitResult{Action: "accept", Content: map[string]any{"name": "Ada", "colour": "Ada"}}, nil
		},
		CreateMessageHandler: func(ctx context.Context, r *mcp.CreateMessageRequest) (*mcp.CreateMessageResult, error) {
			return &mcp.CreateMessageResult{Model: "m", Role: "assistant", Content: &mcp.TextContent{Text: "because"}}, nil
		},
		ProgressNotificationHandler: func(ctx context.Context, r *mcp.ProgressNotificationClientRequest) {
			steps.Lock()
			steps.count++
			steps.Unlock()
		},
	})
	client.AddRoots(&mcp.Root{URI: "file:///srv", Name: "srv"})
	ctx, stop := context.WithTimeout(context.Background(), 60*time.Second)
	defer stop()
	session, err := client.Connect(ctx, transport, &mcp.ClientSessionOptions{ProtocolVersion: revision})
	if err != nil {
		return err
	}
	if told := os.Getenv("CALLS"); told != "" {
		return callThese(ctx, session, told)
	}
	spoken := session.InitializeResult().ProtocolVersion
	if revision != "" && spoken != revision {
		return fmt.Errorf("it speaks %s", spoken)
	}
	for _, scenario := range scenarios {
		line := map[string]string{"scenario": scenario.name, "error": ""}
		if err := scenario.run(ctx, session); err != nil {
			line["error"] = err.Error()
		}
		out, _ := json.Marshal(line)
		fmt.Println(string(out))
	}
	return session.Close()
}

func main() {
	var err error
	role, kind, rest := os.Args[1], os.Args[2], os.Args[3:]
	switch {
	case role == "serve":
		err = serve(kind, rest)
	case kind == "stdio":
		err = callAll(&mcp.CommandTransport{Command: exec.Command(rest[0], rest[1:]...)}, os.Getenv("REVISION"))
	case kind == "sse":
		err = callAll(&mcp.SSEClientTransport{Endpoint: rest[0]}, os.Getenv("REVISION"))
	case kind == "http2":
		protocols := new(http.Protocols)
		protocols.SetUnencryptedHTTP2(true)
		client := &http.Client{Transport: &http.Transport{Protocols: protocols}}
		err = callAll(&mcp.StreamableClientTransport{Endpoint: rest[0], HTTPClient: client}, os.Getenv("REVISION"))
	default:
		err = callAll(&mcp.StreamableClientTransport{Endpoint: rest[0]}, os.Getenv("REVISION"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
