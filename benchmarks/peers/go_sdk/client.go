package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// A turn is what calls came to: seconds of CPU and on the clock, and latencies in ms.
type turn struct {
	Calls int     `json:"calls"`
	CPU   float64 `json:"cpu"`
	Wall  float64 `json:"wall"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
	P999  float64 `json:"p99.9"`
}

func cpuSeconds() float64 {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
}

// take calls echo with so many calls under way as long as there is a next one, and checks each text.
func take(session *mcp.ClientSession, underWay int, next func() (int64, bool)) (*turn, error) {
	var group sync.WaitGroup
	took, failed := make([][]float64, underWay), make([]error, underWay)
	wall, cpu := time.Now(), cpuSeconds()
	for place := range underWay {
		group.Add(1)
		go func() {
			defer group.Done()
			for failed[place] == nil {
				number, more := next()
				if !more {
					return
				}
				began := time.Now()
				failed[place] = call(session, fmt.Sprintf("hello %d", number))
				took[place] = append(took[place], time.Since(began).Seconds()*1e3)
			}
		}()
	}
	group.Wait()
	found := &turn{CPU: cpuSeconds() - cpu, Wall: time.Since(wall).Seconds()}
	for _, err := range failed {
		if err != nil {
			return nil, err
		}
	}
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	found.Calls = len(all)
	for share, value := range map[int]*float64{500: &found.P50, 990: &found.P99, 999: &found.P999} {
		if len(all) > 0 {
			*value = all[(len(all)*share+999)/1000-1]
		}
	}
	return found, nil
}

func call(session *mcp.ClientSession, wanted string) error {
	params := &mcp.CallToolParams{Name: "echo", Arguments: map[string]any{"text": wanted}}
	result, err := session.CallTool(context.Background(), params)
	if err != nil {
		return err
	}
	if len(result.Content) == 1 {
		if found, ok := result.Content[0].(*mcp.TextContent); ok && found.Text == wanted {
			return nil
		}
	}
	return fmt.Errorf("wanted %q, got %v", wanted, result.Content)
}

func times(count int) func() (int64, bool) {
	var begun atomic.Int64
	return func() (int64, bool) {
		number := begun.Add(1)
		return number, number <= int64(count)
	}
}

func until(end time.Time) func() (int64, bool) {
	var begun atomic.Int64
	return func() (int64, bool) { return begun.Add(1), time.Now().Before(end) }
}

// inMemory calls this process' own server, and prints the seconds on the clock and of CPU that it took.
func inMemory(_ string, words []string) error {
	count, _ := strconv.Atoi(words[0])
	underWay, _ := strconv.Atoi(words[1])
	here, there := mcp.NewInMemoryTransports()
	if _, err := makeServer().Connect(context.Background(), there, nil); err != nil {
		return err
	}
	session, err := mcp.NewClient(implementation, nil).Connect(context.Background(), here, nil)
	if err != nil {
		return err
	}
	if _, err := take(session, underWay, times(count/8)); err != nil {
		return err
	}
	found, err := take(session, underWay, times(count))
	if err != nil {
		return err
	}
	fmt.Println(found.Wall, found.CPU)
	return nil
}

// byClient says "ready", and takes a turn for each line, `SECONDS UNDER_WAY` or `CALLSx UNDER_WAY`.
func byClient(_ string, words []string) error {
	revision, target := words[0], words[1:]
	var transport mcp.Transport
	if len(target) == 1 {
		// Go's own client keeps two connections to a server, and would open another for nearly each call.
		kept := http.DefaultTransport.(*http.Transport).Clone()
		kept.MaxIdleConns, kept.MaxIdleConnsPerHost = 0, 1024
		transport = &mcp.StreamableClientTransport{Endpoint: target[0], HTTPClient: &http.Client{Transport: kept}}
	} else {
		transport = &mcp.CommandTransport{Command: exec.Command(target[0], target[1:]...)}
	}
	options := &mcp.ClientSessionOptions{ProtocolVersion: revision}
	session, err := mcp.NewClient(implementation, nil).Connect(context.Background(), transport, options)
	if err != nil {
		return err
	}
	defer session.Close()
	if spoken := session.InitializeResult().ProtocolVersion; spoken != revision {
		return fmt.Errorf("the server speaks %s", spoken)
	}
	fmt.Println("ready")
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		amount, under, _ := strings.Cut(lines.Text(), " ")
		underWay, _ := strconv.Atoi(under)
		var next func() (int64, bool)
		if calls, counted := strings.CutSuffix(amount, "x"); counted {
			count, _ := strconv.Atoi(calls)
			next = times(count)
		} else {
			seconds, _ := strconv.ParseFloat(amount, 64)
			next = until(time.Now().Add(time.Duration(seconds * float64(time.Second))))
		}
		found, err := take(session, underWay, next)
		if err != nil {
			return err
		}
		line, _ := json.Marshal(found)
		fmt.Println(string(line))
	}
	return nil
}
