// One answer on the page: what has come of it, and its view.

import { copyButton, Markdown } from "./markdown.js";
import { cancel, completion, follow, Refused } from "./stream.js";

const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);

function add(parent, tag, className) {
  const made = document.createElement(tag);
  made.className = className;
  made.dir = "auto";
  parent.append(made);
  return made;
}

export class Answer {
  /** `state` is plain data that survives a reload; `changed` is called after each change of it, and `proceed` to have an
   * answer that was cut continued. */
  constructor(parent, state, changed, proceed) {
    this.state = state;
    this.changed = changed;
    this.folded = add(parent, "details", "reasoning");
    this.folded.append(document.createElement("summary"));
    this.folded.firstChild.textContent = "Reasoning";
    this.reasoning = add(this.folded, "div", "");
    this.text = add(parent, "div", "answer");
    this.calls = add(parent, "div", "calls");
    const end = add(parent, "div", "end");
    this.facts = add(end, "div", "facts");
    this.copying = copyButton("Copy the answer", () => this.state.text);
    this.proceeding = add(end, "button", "proceed");
    this.proceeding.type = "button";
    this.proceeding.textContent = "Continue";
    this.proceeding.onclick = proceed;
    end.append(this.copying);
    this.markdown = new Markdown(this.text);
    this.stopping = new AbortController();
    this.show();
  }

  static fresh() {
    return { key: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, sentAt: Date.now(), text: "", reasoning: "", calls: [] };
  }

  /** Follows the answer to its end. Throws `Refused` with status 401. */
  async run(body) {
    this.status("waiting");
    const on = {
      id: (id) => { this.state.id = id; this.changed(); if (this.state.stopped) this.cancel(); },
      chunk: (chunk, last) => this.take(chunk, last),
      connected: () => { this.refused = false; this.status(this.label()); },
      lost: (said) => {
        this.refused = Boolean(said) && !this.state.id;
        this.status(said ? `${said} Trying again …` : "reconnecting …");
      },
      workers: (number) => { if (!this.state.stopped) this.status(number ? this.label() : "no worker is running; waiting …"); },
    };
    try {
      await follow(this.state, body, on, this.stopping.signal);
      await this.finish();
    } catch (error) {
      if (error instanceof Refused && error.status === 401) throw error;
      await this.fail(error);
    }
  }

  take(chunk, last) {
    const state = this.state;
    const [choice] = chunk.choices;
    if (chunk.usage) state.usage = chunk.usage;
    const { content, reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (content || reasoning || calls) {
      state.firstAt ??= Date.now();
      state.lastAt = Date.now();
    }
    state.text += content ?? "";
    state.reasoning += reasoning ?? "";
    for (const { index, function: part } of calls ?? []) {
      const call = (state.calls[index] ??= { name: "", args: "" });
      call.name += part.name ?? "";
      call.args += part.arguments ?? "";
    }
    if (choice?.finish_reason) state.reason = choice.finish_reason;
    state.last = last;
    this.changed();
    this.showSoon();
    this.status(this.label());
  }

  label() { return this.state.stopped ? "stopping …" : this.state.firstAt ? "answering" : "waiting"; }

  /** Replaces the text by the stored answer, which is whole even if the stream had to be given up. */
  async restore() {
    const whole = await completion(this.state.id);
    const { message, finish_reason: reason } = whole.choices[0];
    this.state.text = message.content ?? "";
    this.state.reasoning = message.reasoning ?? "";
    this.state.calls = (message.tool_calls ?? []).map(({ function: call }) => ({ name: call.name, args: call.arguments }));
    this.state.usage = whole.usage;
    this.state.reason = reason;
    this.state.sluice = whole.sluice;
  }

  async finish() {
    try { this.state.sluice = (await completion(this.state.id)).sluice; } catch { /* the line is then shorter */ }
    this.end(this.summary());
  }

  async fail(error) {
    if (this.state.stopped) return this.end("stopped");
    if (this.state.id && error instanceof Refused && error.retryable) {
      try {
        await this.restore();
        return this.end(this.summary());
      } catch (later) { error = later instanceof Refused ? later : error; }
    }
    this.state.failed = true;
    this.end(error instanceof Refused ? error.message : "The gateway does not answer. Try again in a moment.");
  }

  summary() {
    const { usage, sluice, sentAt, firstAt, lastAt, reason } = this.state;
    const timings = sluice?.timings;
    const rate = timings?.tokens_per_s ?? (usage?.completion_tokens - 1) / ((lastAt - firstAt) / 1000);
    const reasoning = usage?.completion_tokens_details?.reasoning_tokens;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    return [
      firstAt && !this.state.resumed ? `first token ${seconds((firstAt - sentAt) / 1000)}` : timings && `first token ${seconds(timings.queue_s + timings.ttft_s)}`,
      rate > 0 && Number.isFinite(rate) && `${Math.round(rate)} tokens/s`,
      usage && `${usage.completion_tokens} ${usage.completion_tokens === 1 ? "token" : "tokens"}`,
      reasoning > 0 && `${reasoning} of reasoning`,
      usage && cached !== undefined && `${cached} of ${usage.prompt_tokens} prompt tokens cached`,
      sluice?.worker && `worker ${sluice.worker}`,
      reason === "length" && "cut at the limit",
    ].filter(Boolean).map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
  }

  stop() {
    // Asked twice: no worker has answered. Refused: there is no job to cancel.
    if (this.state.stopped || this.refused) this.stopping.abort();
    this.state.stopped = true;
    this.status("stopping …");
    if (this.state.id) this.cancel();
  }

  cancel() { cancel(this.state.id).catch(() => {}); }

  end(facts) {
    this.state.done = true;
    this.state.facts = facts;
    this.changed();
    this.show();
  }

  status(text) {
    this.facts.textContent = text;
    this.facts.classList.add("busy");
  }

  showSoon() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.show(); });
  }

  show() {
    const { text, reasoning, calls, facts, failed, done, reason, stopped } = this.state;
    const main = this.text.closest("main");
    const isAtBottom = main && main.scrollHeight - main.scrollTop - main.clientHeight < 60;
    this.folded.hidden = !reasoning;
    this.reasoning.textContent = reasoning;
    this.markdown.show(text);
    this.calls.hidden = !calls.length;
    this.calls.textContent = calls.map(({ name, args }) => `→ ${name}(${args})`).join("\n");
    this.copying.hidden = !done || !text;
    this.proceeding.hidden = !done || failed || !text || !(reason === "length" || stopped);
    if (done) {
      this.facts.textContent = facts ?? "";
      this.facts.classList.remove("busy");
      this.facts.classList.toggle("bad", Boolean(failed));
    }
    if (isAtBottom) main.scrollTop = main.scrollHeight;
  }
}
