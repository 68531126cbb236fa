// A small Redis client over a socket (RESP2), so that the example needs no package. In a backend of yours, use the
// client library that you have: nothing here is particular to Sluice.

import net from "node:net";
import tls from "node:tls";

export class Connection {
  #socket;
  #buffer = Buffer.alloc(0);
  #pending = []; // one {resolve, reject} per command without a reply, oldest first
  #closed = null; // the error that ended the connection

  // Called with the payload of each message, on a connection that has subscribed.
  onMessage = null;
  // Called once, with the error, when the connection has ended.
  onClose = () => {};

  // Connect, log in and select the database of a redis:// or rediss:// URL.
  static async open(url) {
    const { protocol, hostname, port, username, password, pathname } = new URL(url);
    const connection = new Connection();
    await connection.#connect(protocol === "rediss:", hostname, Number(port || 6379));
    const secret = decodeURIComponent(password);
    if (secret) await connection.command("AUTH", decodeURIComponent(username) || "default", secret);
    const database = pathname.slice(1);
    if (database && database !== "0") await connection.command("SELECT", database);
    return connection;
  }

  // Send a command and return its reply: a string, a number, an array or null. Rejects with the server's error.
  async command(...words) {
    const [reply] = await this.pipeline([words]);
    return reply;
  }

  // Send commands in one write, so that no other caller's commands come between them, and return their replies.
  pipeline(commands) {
    if (this.#closed) return Promise.reject(this.#closed);
    const replies = commands.map(() => new Promise((resolve, reject) => this.#pending.push({ resolve, reject })));
    this.#socket.write(Buffer.concat(commands.map(encode)));
    return Promise.all(replies);
  }

  close() {
    this.#end(new Error("the connection was closed"));
    this.#socket.destroy();
  }

  #connect(secure, host, port) {
    return new Promise((resolve, reject) => {
      this.#socket = secure ? tls.connect({ host, port, servername: host }) : net.connect({ host, port });
      this.#socket.setKeepAlive(true, 5000);
      this.#socket.once(secure ? "secureConnect" : "connect", resolve);
      this.#socket.on("data", (bytes) => this.#receive(bytes));
      this.#socket.on("error", (error) => (reject(error), this.#end(error)));
      this.#socket.on("close", () => this.#end(new Error("the server closed the connection")));
    });
  }

  #receive(bytes) {
    this.#buffer = Buffer.concat([this.#buffer, bytes]);
    for (let found = decode(this.#buffer, 0); found; found = decode(this.#buffer, 0)) {
      this.#buffer = this.#buffer.subarray(found.end);
      this.#deliver(found.value);
    }
  }

  #deliver(reply) {
    if (this.onMessage && Array.isArray(reply) && reply[0] === "message") return this.onMessage(reply[2]);
    const { resolve, reject } = this.#pending.shift();
    return reply instanceof Error ? reject(reply) : resolve(reply);
  }

  #end(error) {
    if (this.#closed) return;
    this.#closed = error;
    for (const { reject } of this.#pending.splice(0)) reject(error);
    this.onClose(error);
  }
}

function encode(words) {
  const parts = words.map(String).map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`);
  return Buffer.from(`*${words.length}\r\n${parts.join("")}`);
}

// Return {value, end} of the reply that begins at `start`, or null if it is not complete yet.
function decode(buffer, start) {
  const lineEnd = buffer.indexOf("\r\n", start);
  if (lineEnd < 0) return null;
  const line = buffer.toString("utf8", start + 1, lineEnd);
  const end = lineEnd + 2;
  switch (String.fromCharCode(buffer[start])) {
    case "+":
      return { value: line, end };
    case "-":
      return { value: new Error(line), end };
    case ":":
      return { value: Number(line), end };
    case "$":
      return decodeBulk(buffer, end, Number(line));
    default:
      return decodeArray(buffer, end, Number(line));
  }
}

function decodeBulk(buffer, start, length) {
  if (length < 0) return { value: null, end: start };
  const end = start + length + 2;
  return buffer.length < end ? null : { value: buffer.toString("utf8", start, end - 2), end };
}

function decodeArray(buffer, start, length) {
  if (length < 0) return { value: null, end: start };
  const value = [];
  let end = start;
  while (value.length < length) {
    const item = decode(buffer, end);
    if (!item) return null;
    value.push(item.value);
    end = item.end;
  }
  return { value, end };
}
