// What both pages share: commands to the site that serves them, text of peers, small components.
import {Component, h, render} from "/vendor/preact.mjs";
import {useEffect, useLayoutEffect, useRef, useState} from "/vendor/hooks.mjs";
import htm from "/vendor/htm.mjs";

export {Component, render, useEffect, useLayoutEffect, useRef, useState};
export const html = htm.bind(h);

// The token is in the address once; then it is of this tab alone, and goes into a header.
if (location.hash.length > 1) {
  sessionStorage.setItem("token", location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}
const token = sessionStorage.getItem("token") || "";

// Yields what the site sends for a command, line by line.
export async function* lines(name, members = {}, signal = undefined) {
  const reply = await fetch(`/do/${name}`, {
    method: "POST",
    headers: {"Authorization": `Bearer ${token}`, "Content-Type": "application/json"},
    body: typeof members === "string" ? members : JSON.stringify(members),
    signal,
  });
  if ([400, 401].includes(reply.status)) throw new Error("This page wants the whole address that the command printed.");
  if (!reply.ok) throw new Error(`The command answered ${reply.status}.`);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

// Returns the last line; one with an error is thrown.
export async function ask(name, members) {
  let last = {error: "The command has ended."};
  for await (const line of lines(name, members)) last = line;
  if (last.error !== undefined) throw new Error(last.error);
  return last.done;
}

// Follows a command until what it returns is called, and begins it anew where it ends.
export function follow(name, members, take, failed) {
  const stop = new AbortController();
  (async () => {
    while (!stop.signal.aborted) {
      try {
        for await (const line of lines(name, members, stop.signal)) {
          if (line.error !== undefined) throw new Error(line.error);
          take(line);
        }
        failed("The command has ended.");
      } catch (error) {
        if (!stop.signal.aborted) failed(error instanceof TypeError ? "The command has ended." : error.message);
      }
      await new Promise(again => setTimeout(again, 2000));
    }
  })();
  return () => stop.abort();
}

// Text of a peer: what could turn its direction or hide in it is made visible, and it has an end.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
export function said(value, longest = 300) {
  const text = String(value ?? "").replace(HIDDEN, sign => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return text.length > longest ? `${text.slice(0, longest)}…` : text;
}

export function seconds(value) {
  if (value < 0.1) return `${Math.round(1000 * value)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  const two = number => String(number).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return unit === "B" ? `${value} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} GiB`;
}

export const count = (number, one) => `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;

export function Progress({done, total, message, rate}) {
  if (done === null || done === undefined) return null;
  const share = total ? Math.min(1, Math.max(0, done / total)) : null;
  const left = share !== null && rate > 0 ? `, ${seconds(Math.max(0, total - done) / rate)} left` : "";
  const told = share === null ? done.toLocaleString("en") : `${Math.round(100 * share)} %${left}`;
  return html`<span class="progress">
    ${share !== null && html`<progress max="1" value=${share} aria-label="progress"></progress>`}
    <small>${told}${message ? ` · ${said(message, 120)}` : ""}</small></span>`;
}

// A line of the latest values, the newest to the right.
export function Spark({name, values}) {
  const most = Math.max(1, ...values);
  const points = values.map((value, at) => `${120 - values.length + at},${19 - 18 * value / most}`).join(" ");
  const now = values.length ? values[values.length - 1] : 0;
  return html`<figure class="spark"><figcaption>${name} <b>${now.toLocaleString("en")}</b></figcaption>
    <svg viewBox="0 0 120 20" preserveAspectRatio="none" role="img" aria-label=${`${name}, at most ${most}`}>
      <polyline points=${points} /></svg></figure>`;
}

// A dialog that asks for a line of text, or for a yes. Escape and its other button leave it.
// It opens and goes within the key or click that says so: an effect after the frame, and the browser's own event of its
// end, come later, and what is typed before them would be lost.
export function Ask({question, label, button, typed = "", done, left}) {
  const box = useRef(null), [text, setText] = useState(typed);
  useLayoutEffect(() => box.current.showModal(), []);
  const press = event => {
    event.stopPropagation();
    if (event.key === "Escape") event.preventDefault(), left();
  };
  return html`<dialog ref=${box} onClose=${left} onKeyDown=${press} aria-label=${question}>
    <form onSubmit=${event => (event.preventDefault(), done(text))}>
      <p>${question}</p>
      ${label && html`<label>${label} <input name="answer" value=${text} maxlength="500"
        onInput=${event => setText(event.target.value)} /></label>`}
      <p class="buttons"><button class="main">${button}</button>
        <button type="button" onClick=${left}>Leave it</button></p>
    </form></dialog>`;
}
