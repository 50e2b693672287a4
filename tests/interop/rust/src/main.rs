//! A server and a client on the official Rust SDK, for the interop tests.
//!
//!     peer serve stdio|http [REVISION ...]    serve; over HTTP print where
//!     peer call http URL                      carry out the scenarios, and print a line of JSON for each
//!     peer call stdio COMMAND ARGUMENT ...
//!
//! With the environment variable CALLS, a list of [TOOL, ARGUMENTS, TEXT], a client makes these calls instead, and looks
//! for the texts in their results. The environment variable REVISION is what the client speaks; without it, what it finds.

#![allow(deprecated)]

use std::{borrow::Cow, process::Stdio, sync::Arc, sync::atomic::AtomicUsize, sync::atomic::Ordering, time::Duration};

use anyhow::{Result, anyhow, ensure};
use rmcp::{
    ClientHandler, ClientLifecycleMode, ClientServiceExt, ErrorData, Json, RoleClient, RoleServer, ServerHandler,
    ServiceExt,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    model::*,
    schemars,
    service::{NotificationContext, RequestContext, RunningService},
    tool, tool_handler, tool_router,
    transport::{
        StreamableHttpClientTransport, TokioChildProcess,
        streamable_http_server::{
            StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
        },
    },
};
use serde_json::{Value, json};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Pair {
    a: i64,
    b: i64,
}

#[derive(serde::Serialize, schemars::JsonSchema)]
struct Sum {
    total: i64,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Said {
    text: String,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct UpTo {
    to: u32,
}

#[derive(Clone)]
struct Served {
    tool_router: ToolRouter<Self>,
    revisions: Vec<ProtocolVersion>,
}

#[tool_router]
impl Served {
    fn new(revisions: Vec<ProtocolVersion>) -> Self {
        Self { tool_router: Self::tool_router(), revisions }
    }

    #[tool(description = "Add two whole numbers.")]
    fn add(&self, Parameters(Pair { a, b }): Parameters<Pair>) -> Json<Sum> {
        Json(Sum { total: a + b })
    }

    #[tool(description = "Return the text as it came.")]
    fn echo(&self, Parameters(Said { text }): Parameters<Said>) -> String {
        text
    }

    #[tool(description = "Count aloud.")]
    async fn count(
        &self,
        Parameters(UpTo { to }): Parameters<UpTo>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        for n in 1..=to {
            if let Some(token) = context.meta.get_progress_token() {
                let step = ProgressNotificationParam::new(token, n.into()).with_total(to.into());
                let _ = context.peer.notify_progress(step).await;
            }
        }
        Ok("done".into())
    }

    #[tool(description = "Fail in a way the model can read.")]
    fn fail(&self) -> Result<String, String> {
        Err("no luck today".into())
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Served {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build()).with_instructions("Ask for anything.")
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Owned(self.revisions.clone())
    }
}

fn version(name: &str) -> Result<ProtocolVersion> {
    Ok(serde_json::from_value(json!(name))?)
}

async fn serve(transport: &str, names: &[String]) -> Result<()> {
    let known = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"].map(String::from);
    let names = if names.is_empty() { &known[..] } else { names };
    let revisions: Vec<_> = names.iter().rev().map(|name| version(name)).collect::<Result<_>>()?;
    if transport == "stdio" {
        Served::new(revisions).serve(rmcp::transport::stdio()).await?.waiting().await?;
        return Ok(());
    }
    let service = StreamableHttpService::new(
        move || Ok(Served::new(revisions.clone())),
        Arc::new(LocalSessionManager::default()),
        StreamableHttpServerConfig::default(),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("http://{}", listener.local_addr()?);
    axum::serve(listener, axum::Router::new().nest_service("/mcp", service)).await?;
    Ok(())
}

#[derive(Clone, Default)]
struct Person {
    steps: Arc<AtomicUsize>,
}

impl ClientHandler for Person {
    fn get_info(&self) -> ClientConfig {
        let can = ClientCapabilities::builder().enable_elicitation().enable_sampling().enable_roots().build();
        ClientConfig::new(can, Implementation::new("rust", "1.0"))
    }

    async fn create_elicitation(
        &self,
        _request: ElicitRequestParams,
        _context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        Ok(ElicitResult::new(ElicitationAction::Accept).with_content(json!({"name": "Ada", "colour": "Ada"})))
    }

    async fn create_message(
        &self,
        _params: CreateMessageRequestParams,
        _context: RequestContext<RoleClient>,
    ) -> Result<CreateMessageResult, ErrorData> {
        Ok(CreateMessageResult::new(SamplingMessage::assistant_text("because"), "m".into()))
    }

    async fn list_roots(&self, _context: RequestContext<RoleClient>) -> Result<ListRootsResult, ErrorData> {
        Ok(ListRootsResult::new(vec![Root::new("file:///srv")]))
    }

    async fn on_progress(&self, _params: ProgressNotificationParam, _context: NotificationContext<RoleClient>) {
        self.steps.fetch_add(1, Ordering::SeqCst);
    }
}

type Session = RunningService<RoleClient, Person>;

async fn call(session: &Session, name: &'static str, arguments: Value) -> Result<(String, CallToolResult)> {
    let params = CallToolRequestParams::new(name).with_arguments(arguments.as_object().unwrap().clone());
    let result = session.call_tool(params).await?;
    let text = result.content.iter().filter_map(|block| block.as_text().map(|t| t.text.clone())).collect();
    Ok((text, result))
}

async fn expect(session: &Session, name: &'static str, arguments: Value, wanted: &str) -> Result<()> {
    let (found, _) = call(session, name, arguments).await?;
    ensure!(found == wanted, "found {found}");
    Ok(())
}

async fn scenario(name: &str, session: &Arc<Session>, person: &Person) -> Result<()> {
    match name {
        "tools" => {
            let tools = session.list_all_tools().await?;
            ensure!(tools.iter().any(|tool| tool.name == "greet"), "found {} tools", tools.len());
        }
        "echo" => expect(session, "echo", json!({"text": "grüße\u{2028}"}), "grüße\u{2028}").await?,
        "structured" => {
            let (text, result) = call(session, "add", json!({"a": 2, "b": 3})).await?;
            // Before 2025-06-18 there is the text alone.
            let total = result.structured_content;
            ensure!(total == Some(json!({"total": 5})) || (total.is_none() && text.contains('5')), "found {total:?}");
        }
        "progress" => {
            expect(session, "count", json!({"to": 5}), "done").await?;
            for _ in 0..100 {
                if person.steps.load(Ordering::SeqCst) == 5 {
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            return Err(anyhow!("not all of the progress came"));
        }
        "tool error" => {
            let (text, result) = call(session, "fail", json!({})).await?;
            ensure!(result.is_error == Some(true) && text == "no luck today", "found {text}");
        }
        "large" => {
            let (text, _) = call(session, "large", json!({"size": 2_000_000})).await?;
            ensure!(text.len() == 2_000_000, "found {}", text.len());
        }
        "questions" => expect(session, "greet", json!({}), "Ada likes Ada").await?,
        "sampling" => expect(session, "think", json!({"question": "Why?"}), "m says because").await?,
        "roots" => {
            let (text, _) = call(session, "places", json!({})).await?;
            ensure!(text.contains("file:///srv"), "found {text}");
        }
        "resource" => {
            let read = session.read_resource(ReadResourceRequestParams::new("interop://greeting")).await?;
            ensure!(serde_json::to_value(&read)?["contents"][0]["text"] == "hello", "found {read:?}");
        }
        "prompt" => {
            let arguments = json!({"path": "setup.py"}).as_object().unwrap().clone();
            let got = session.get_prompt(GetPromptRequestParams::new("review").with_arguments(arguments)).await?;
            let found = serde_json::to_value(&got)?["messages"][0]["content"]["text"].clone();
            ensure!(found == "Please review setup.py.", "found {found}");
        }
        "many" => {
            let mut calls = tokio::task::JoinSet::new();
            for n in 0..50 {
                let session = session.clone();
                calls.spawn(async move {
                    let text = n.to_string();
                    expect(&session, "echo", json!({"text": text}), &text).await
                });
            }
            for done in calls.join_all().await {
                done?;
            }
        }
        _ => return Err(anyhow!("no such scenario")),
    }
    Ok(())
}

async fn call_these(session: &Session, told: &str) -> Result<()> {
    let listed = session.list_all_tools().await?;
    for (tool, arguments, wanted) in serde_json::from_str::<Vec<(String, Value, String)>>(told)? {
        let params = CallToolRequestParams::new(tool.clone()).with_arguments(arguments.as_object().unwrap().clone());
        let error = match session.call_tool(params).await {
            Err(error) => format!("{error:#}"),
            Ok(result) => match serde_json::to_string(&result.content)? {
                found if !found.contains(&wanted) => format!("found {found}"),
                _ if listed.iter().all(|each| each.name != tool) => "it is not listed".into(),
                _ => String::new(),
            },
        };
        println!("{}", json!({"scenario": tool, "error": error}));
    }
    Ok(())
}

async fn call_all(kind: &str, rest: &[String]) -> Result<()> {
    let revision = std::env::var("REVISION").unwrap_or_default();
    let mode = if revision.is_empty() {
        ClientLifecycleMode::Auto { preferred_versions: vec![ProtocolVersion::V_2026_07_28], legacy_version: None }
    } else if revision == "2026-07-28" {
        ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::V_2026_07_28] }
    } else {
        ClientLifecycleMode::Initialize
    };
    let person = Person::default();
    let running = Arc::new(if kind == "stdio" {
        let mut command = tokio::process::Command::new(&rest[0]);
        command.args(&rest[1..]);
        let (child, _) = TokioChildProcess::builder(command).stderr(Stdio::inherit()).spawn()?;
        person.clone().serve_with_lifecycle(child, mode).await?
    } else {
        let transport = StreamableHttpClientTransport::from_uri(rest[0].as_str());
        person.clone().serve_with_lifecycle(transport, mode).await?
    });
    if let Ok(told) = std::env::var("CALLS") {
        call_these(&running, &told).await?;
        if let Some(running) = Arc::into_inner(running) {
            running.cancel().await?;
        }
        return Ok(());
    }
    for name in [
        "tools", "echo", "structured", "progress", "tool error", "large", "questions", "sampling", "roots", "resource",
        "prompt", "many",
    ] {
        let limit = Duration::from_secs(20);
        let outcome = tokio::time::timeout(limit, scenario(name, &running, &person)).await;
        let error = match outcome {
            Ok(Ok(())) => String::new(),
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => "it took too long".into(),
        };
        println!("{}", json!({"scenario": name, "error": error}));
    }
    if let Some(running) = Arc::into_inner(running) {
        running.cancel().await?;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    rustls::crypto::ring::default_provider().install_default().expect("the only one");
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words[0] == "serve" {
        serve(&words[1], &words[2..]).await
    } else {
        call_all(&words[1], &words[2..]).await
    }
}
