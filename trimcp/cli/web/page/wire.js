// What is said, message by message: the list that both pages show.
import {Component, bytes, count, html, said, seconds, useRef, useState} from "/base.js";

const KEPT = 500, SHOWN = 100;

// Values that change often, drawn once a frame.
export function useDrawn(initial) {
  const [, draw] = useState(0), kept = useRef(initial), waiting = useRef(false);
  const change = edit => {
    edit(kept.current);
    if (waiting.current) return;
    waiting.current = true;
    requestAnimationFrame(() => { waiting.current = false; draw(number => number + 1); });
  };
  return [kept.current, change];
}

// Returns what is kept once a batch has come. What went by before the first one is not missed.
export const NOTHING = {events: [], missed: 0, followed: false};
export function taken({events, missed, followed}, batch) {
  const anew = batch.events.length > 0 && batch.events[0].n <= (events.at(-1)?.n ?? 0);
  return {events: [...anew ? [] : events, ...batch.events].slice(-KEPT), missed: followed ? missed + batch.missed : 0, followed: true};
}

export function Wire({live, title, children}) {
  const [filter, setFilter] = useState(""), [held, hold] = useState(null), wanted = filter.toLowerCase();
  const all = held ?? live.events;
  const found = wanted ? all.filter(one => `${one.method ?? ""} ${one.text}`.toLowerCase().includes(wanted)) : all;
  return html`<section class="wire"><div class="bar"><h2>${title} <small>${live.followed ? count(live.events.at(-1)?.n ?? 0, "event") : "connecting"}</small></h2>
      ${children}
      <label>Filter <input type="search" value=${filter} onInput=${event => setFilter(event.target.value)} /></label>
      <button aria-pressed=${held !== null} onClick=${() => hold(held === null ? live.events : null)}>${held === null ? "Hold" : "Go on"}</button></div>
    ${live.missed > 0 && html`<p class="dim">${count(live.missed, "event")} went by unseen.</p>`}
    <ol>${found.slice(-SHOWN).reverse().map(event => html`<${Row} key=${event.n} event=${event} />`)}</ol></section>`;
}

// An event never changes, so it is drawn once. What was drawn before is not kept beside: it would hold the elements of rows
// that are gone.
class Row extends Component {
  shouldComponentUpdate({event}) { return event !== this.props.event; }
  render({event}) { return html`<li><${Event} event=${event} /></li>`; }
}

function Event({event}) {
  const [opened, open] = useState(false);
  const time = new Date(1000 * event.at).toISOString().slice(11, 23);
  if (event.kind === "log") return html`<div class="event"><span class="age">${time}</span> <b class="warn">${said(event.level, 20)}</b>
    <span class="line">${said(event.logger ?? "", 60)} ${said(event.text, 300)}</span></div>`;
  const error = event.error !== undefined && event.error !== null;
  return html`<div class="event"><span class="age">${time}</span>
      <span aria-label=${event.ours ? "sent" : "received"}>${event.ours ? "→" : "←"}</span>
      <button class="open line" aria-expanded=${opened} onClick=${() => open(!opened)}>
        ${said(event.method ?? "answer", 60)} ${event.id !== null && event.id !== undefined && said(event.id, 40)}</button>
      <span class=${error ? "warn" : "dim"}>${error ? `error ${event.error}, ` : ""}${bytes(event.size)}${event.took !== null ? `, ${seconds(event.took)}` : ""}</span></div>
    ${opened && html`<pre tabindex="0">${event.text ? said(pretty(event.text), 20_000) : "What is in it was not asked for."}${event.cut ? "…" : ""}</pre>`}`;
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
