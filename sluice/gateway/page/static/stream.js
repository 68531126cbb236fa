// The gateway's HTTP interface, as this page uses it. A stream that breaks off is resumed after its last event.

const COMPLETIONS = "v1/chat/completions";
const KEY = "sluice.key";
const TRIES = 12; // in a row without an event; about a minute
const MAX_WAIT_MS = 8_000;

/** An error that the gateway reports. `status` is 0 inside a stream. */
export class Refused extends Error {
  constructor(status, message, retryable) {
    super(message);
    this.status = status;
    this.retryable = retryable;
  }
}

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";
export const storeKey = (key) => sessionStorage.setItem(KEY, key);

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (storedKey()) headers.Authorization = `Bearer ${storedKey()}`;
  const reply = await fetch(path, { ...options, headers, credentials: "omit" });
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, said.error?.message ?? `The server answered ${reply.status}.`, reply.headers.get("x-should-retry") === "true");
}

/** Returns the models: `{id, sluice: {images}}`. */
export const models = async () => (await (await send("v1/models")).json()).data;

/** Returns the whole answer, once it has ended. */
export const completion = async (id) => (await send(`${COMPLETIONS}/${id}`)).json();

export const cancel = (id) => send(`${COMPLETIONS}/${id}/cancel`, { method: "POST" });

const pause = (ms, signal) => new Promise((resolve) => {
  setTimeout(resolve, ms);
  signal.addEventListener("abort", resolve, { once: true });
});

/** Begins an answer, or continues one. `answer` holds `key`, a random name of the request; `id` and `last`, if known.
 * Calls `on.id(id)`, `on.chunk(chunk, last)`, `on.connected()`, `on.workers(number)` and, before it tries again, `on.lost(said)` with what the
 * gateway said, "" if it did not answer; returns at the end of the answer. Throws `Refused`. */
export async function follow(answer, body, on, signal) {
  let { id, last } = answer;
  for (let failures = 0; ; ) {
    let said = "";
    try {
      const reply = await (id ? resume(id, last, signal) : begin(answer.key, body, signal));
      id ??= reply.headers.get("x-request-id");
      on.id(id);
      on.connected();
      for await (const event of events(reply.body)) {
        if (event.workers !== undefined) { on.workers(event.workers); continue; }
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Refused(0, chunk.error.message, true);
        failures = 0;
        last = event.id ?? last;
        on.chunk(chunk, last);
      }
    } catch (error) {
      const isFinal = error instanceof Refused && !(error.status > 500 && error.retryable); // a 500 of the job stays one
      if (isFinal || signal.aborted || failures >= TRIES) throw error;
      if (error instanceof Refused) said = error.message;
    }
    on.lost(said);
    await pause(Math.min(MAX_WAIT_MS, 250 * 2 ** failures++), signal);
  }
}

const begin = (key, body, signal) => send(COMPLETIONS, {
  method: "POST",
  signal,
  headers: { "Content-Type": "application/json", "Idempotency-Key": key },
  body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
});

const resume = (id, last, signal) => send(`${COMPLETIONS}/${id}/stream?include_usage=true`, {
  signal,
  headers: last === undefined ? {} : { "Last-Event-ID": last },
});

/** Yields the server-sent events of a body: `{id, data}`; and `{workers}`, their number, for a job that waits for one. */
async function* events(body) {
  let buffered = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffered += value;
    // This comment has no empty line behind it; it is shown before the next event has come.
    buffered = buffered.replace(/^: waiting, workers=(\d+)\n/gm, "workers: $1\n\n");
    const parts = buffered.split("\n\n");
    buffered = parts.pop();
    for (const part of parts) {
      const event = {};
      for (const line of part.split("\n")) {
        const colon = line.indexOf(": ");
        if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 2);
      }
      if (event.workers) yield { workers: Number(event.workers) };
      else if (event.data) yield event;
    }
  }
}
