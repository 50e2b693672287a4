//! The measured tools on the official Rust SDK.
//!
//!     bench stdio | http [--reply json|sse]
//!
//! Over a network the first line of output is the URL. Nagle's algorithm is off, which axum leaves on.

use std::sync::Arc;

use anyhow::Result;
use axum::serve::ListenerExt;
use rmcp::{
    ErrorData, RoleServer, ServerHandler, ServiceExt,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    model::*,
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
    },
};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Said {
    text: String,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Pair {
    a: i64,
    b: i64,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct UpTo {
    n: u32,
}

#[derive(Clone)]
struct Served {
    tool_router: ToolRouter<Self>,
}

#[tool_router]
impl Served {
    fn new() -> Self {
        Self { tool_router: Self::tool_router() }
    }

    #[tool(description = "Return the text.")]
    fn echo(&self, Parameters(Said { text }): Parameters<Said>) -> String {
        text
    }

    #[tool(description = "Return the sum.")]
    fn add(&self, Parameters(Pair { a, b }): Parameters<Pair>) -> String {
        (a + b).to_string()
    }

    #[tool(description = "Report every number on the way.")]
    async fn stream(
        &self,
        Parameters(UpTo { n }): Parameters<UpTo>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        if let Some(token) = context.meta.get_progress_token() {
            for step in 1..=n {
                let told = ProgressNotificationParam::new(token.clone(), step.into()).with_total(n.into());
                let _ = context.peer.notify_progress(told).await;
            }
        }
        Ok("done".into())
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Served {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words[0] == "stdio" {
        Served::new().serve(rmcp::transport::stdio()).await?.waiting().await?;
        return Ok(());
    }
    let served = Served::new();
    let json = words.iter().any(|word| word == "json");
    let config = StreamableHttpServerConfig::default().with_json_response(json);
    let sessions = Arc::new(LocalSessionManager::default());
    let service = StreamableHttpService::new(move || Ok(served.clone()), sessions, config);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}/mcp", listener.local_addr()?);
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, axum::Router::new().nest_service("/mcp", service)).await?;
    Ok(())
}
