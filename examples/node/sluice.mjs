// A producer for Sluice in plain Redis commands, as docs/contract.md describes them.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { Connection } from "./redis.mjs";

const BODY_LIFE_MS = 86_400_000;
const SILENCE_MS = 1000; // read the list again after this long without a message
const UNKNOWN_MS = 10_000; // a job without a trace for this long does not exist
const OUTAGE_MS = 60_000;
const FINAL = new Set(["finished", "failed", "cancelled"]);

export class Sluice {
  #url;
  #connecting = null;

  constructor(url) {
    this.#url = url;
  }

  // Queue a chat, the body of an OpenAI chat completion, and return the job's id. An id can be used once.
  async submit(request, { model = "default", lane = "interactive", id = randomUUID() } = {}) {
    const redis = await this.#redis();
    if (await redis.command("EXISTS", `arq:job:${id}`, `sluice:job:${id}`)) throw new Error(`job ${id} exists already`);
    const [seconds, microseconds] = await redis.command("TIME"); // a clock that is ahead would delay the job
    const now = Number(seconds) * 1000 + Math.floor(Number(microseconds) / 1000);
    const body = JSON.stringify({ t: null, f: "chat", a: [request], k: {}, et: now });
    const replies = await redis.pipeline([
      ["MULTI"],
      ["SET", `arq:job:${id}`, body, "PX", BODY_LIFE_MS],
      ["ZADD", `sluice:queue:${model}:${lane}`, now, id],
      ["PUBLISH", `sluice:wake:${model}`, ""],
      ["EXEC"],
    ]);
    const refused = replies.at(-1).find((reply) => reply instanceof Error);
    if (refused) throw refused;
    return id;
  }

  // Yield the job's events with a seq above `after`, once and in order, up to the final one. A lost connection is
  // replaced, and the stream continues after the last event.
  async *stream(id, after = -1) {
    let next = after + 1;
    let lostSince = null;
    for (;;) {
      try {
        for await (const event of this.#follow(id, next)) {
          next = event.seq + 1;
          lostSince = null;
          yield event;
          if (FINAL.has(event.type)) return;
        }
      } catch (error) {
        if (error instanceof UnknownJob) throw error;
        lostSince ??= Date.now();
        if (Date.now() - lostSince > OUTAGE_MS) throw error;
        await sleep(200);
      }
    }
  }

  // Ask for the end of a job; its stream then ends with `cancelled`, unless it has just ended otherwise.
  async cancel(id) {
    const redis = await this.#redis();
    await redis.command("SET", `sluice:cancel:${id}`, "1", "EX", 3600);
    await redis.command("PUBLISH", "sluice:control", id);
  }

  // Return the stored result of a job that has ended: a chat.completion, or its event `failed` or `cancelled`.
  async result(id) {
    const stored = await (await this.#redis()).command("GET", `sluice:result:${id}`);
    return stored === null ? null : JSON.parse(stored);
  }

  async close() {
    const connecting = this.#connecting;
    this.#connecting = null;
    (await connecting?.catch(() => null))?.close();
  }

  // Subscribe first, then read the list: together they have every event.
  async *#follow(id, next) {
    const inbox = new Inbox();
    const subscriber = await Connection.open(this.#url);
    try {
      subscriber.onMessage = (payload) => inbox.put(JSON.parse(payload));
      subscriber.onClose = (error) => inbox.fail(error);
      await subscriber.command("SUBSCRIBE", `sluice:ch:${id}`); // returns with the acknowledgement
      const seen = { at: Date.now() };
      let events = await this.#read(id, next, seen);
      for (;;) {
        for (const event of events) {
          if (event.seq > next) break; // a gap: the list has what is missing
          if (event.seq < next) continue;
          next += 1;
          yield event;
        }
        const gap = events.some((event) => event.seq > next);
        events = gap ? [] : await inbox.take(SILENCE_MS);
        if (events.length === 0) events = await this.#read(id, next, seen);
      }
    } finally {
      subscriber.close();
    }
  }

  async #read(id, next, seen) {
    const redis = await this.#redis();
    const events = await redis.command("LRANGE", `sluice:log:${id}`, next, -1);
    if (events.length > 0 || (await redis.command("EXISTS", `sluice:log:${id}`, `arq:job:${id}`))) {
      seen.at = Date.now();
    } else if (Date.now() - seen.at > UNKNOWN_MS) {
      throw new UnknownJob(`no such job, or its events have expired: ${id}`);
    }
    return events.map((event) => JSON.parse(event));
  }

  // Return the connection for commands, a new one if the last was lost.
  #redis() {
    this.#connecting ??= this.#connect();
    return this.#connecting;
  }

  async #connect() {
    const forget = () => (this.#connecting = null);
    try {
      const connection = await Connection.open(this.#url);
      connection.onClose = forget;
      return connection;
    } catch (error) {
      forget();
      throw error;
    }
  }
}

export class UnknownJob extends Error {}

// Messages between the socket and a stream.
class Inbox {
  #events = [];
  #error = null;
  #wake = () => {};

  put(event) {
    this.#events.push(event);
    this.#wake();
  }

  fail(error) {
    this.#error = error;
    this.#wake();
  }

  // Return what has come, waiting up to `ms` for it; [] after silence. Throws if the connection was lost.
  async take(ms) {
    if (this.#events.length === 0 && !this.#error) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, ms);
        this.#wake = () => (clearTimeout(timer), resolve());
      });
    }
    if (this.#events.length === 0 && this.#error) throw this.#error;
    return this.#events.splice(0);
  }
}
