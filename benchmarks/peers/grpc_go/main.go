// Agent tools through gRPC, written on grpc-go: what agent_grpc.py compares with. It prints its address.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"bench/pb"
)

type tools struct{}

func (tools) call(ctx context.Context, request *pb.ToolRequest) (*pb.ToolResponse, error) {
	if request.GetToolName() != "echo" {
		return nil, status.Error(codes.NotFound, "there is no such tool")
	}
	var arguments struct {
		Text *string `json:"text"`
	}
	if err := json.Unmarshal(request.GetArgumentsJson(), &arguments); err != nil || arguments.Text == nil {
		return nil, status.Error(codes.InvalidArgument, "text must be a string")
	}
	result, err := json.Marshal(*arguments.Text)
	if err != nil {
		return nil, err
	}
	return &pb.ToolResponse{RequestId: request.GetRequestId(), Status: "success", ResultJson: result}, nil
}

func (tools) stream(request *pb.ToolRequest, stream grpc.ServerStream) error {
	var arguments struct {
		N int `json:"n"`
	}
	if err := json.Unmarshal(request.GetArgumentsJson(), &arguments); err != nil {
		return status.Error(codes.InvalidArgument, "n must be a number")
	}
	total := float64(arguments.N)
	for each := 1; each <= arguments.N; each++ {
		progress := &pb.ToolProgress{RequestId: request.GetRequestId(), Progress: float64(each), Total: &total}
		if err := stream.SendMsg(&pb.CallEvent{Event: &pb.CallEvent_Progress{Progress: progress}}); err != nil {
			return err
		}
	}
	response := &pb.ToolResponse{RequestId: request.GetRequestId(), Status: "success", ResultJson: []byte(`"done"`)}
	return stream.SendMsg(&pb.CallEvent{Event: &pb.CallEvent_Response{Response: response}})
}

var service = grpc.ServiceDesc{
	ServiceName: "trimcp.v1.AgentTools",
	HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{
		MethodName: "Call",
		Handler: func(server any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			request := new(pb.ToolRequest)
			if err := decode(request); err != nil {
				return nil, err
			}
			return server.(tools).call(ctx, request)
		},
	}},
	Streams: []grpc.StreamDesc{{
		StreamName:    "CallStream",
		ServerStreams: true,
		Handler: func(server any, stream grpc.ServerStream) error {
			request := new(pb.ToolRequest)
			if err := stream.RecvMsg(request); err != nil {
				return err
			}
			return server.(tools).stream(request, stream)
		},
	}},
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer()
	server.RegisterService(&service, tools{})
	fmt.Println(listener.Addr())
	panic(server.Serve(listener))
}
