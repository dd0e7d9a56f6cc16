// One stream of all runs' changes, which goes on where it broke off. It is closed while nobody looks.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 30_000;

export class LiveStream {
  /** `tell` is called with what happens: up, anew, lost, run, deleted. */
  constructor(tell) {
    this.tell = tell;
    this.source = null;
    this.last = "";
    this.wanted = false;
    this.timer = 0;
    this.waitMs = FIRST_WAIT_MS;
  }

  /** Whether anybody looks. */
  want(wanted) {
    this.wanted = wanted;
    if (wanted) this.open();
    else this.close();
  }

  /** Somebody has signed in: what was before is another's. */
  begin() {
    this.close();
    this.last = "";
    this.waitMs = FIRST_WAIT_MS;
    if (this.wanted) this.open();
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  open() {
    if (this.source) return;
    clearTimeout(this.timer);
    const source = new EventSource(`/v1/changes${this.last ? `?after=${encodeURIComponent(this.last)}` : ""}`);
    this.source = source;
    const on = (kind, act) =>
      source.addEventListener(kind, (event) => {
        this.last = event.lastEventId || this.last;
        act(JSON.parse(event.data));
      });
    on("begin", (data) => {
      this.waitMs = FIRST_WAIT_MS;
      this.tell({ kind: "up" });
      if (data.anew) this.tell({ kind: "anew" });
    });
    on("run", (run) => this.tell({ kind: "run", run }));
    on("deleted", (data) => this.tell({ kind: "deleted", id: data.id }));
    source.onerror = () => {
      if (this.source !== source) return;
      this.tell({ kind: "lost" });
      if (source.readyState !== EventSource.CLOSED) return; // It connects again by itself.
      this.source = null;
      this.timer = setTimeout(() => this.wanted && this.open(), this.waitMs);
      this.waitMs = Math.min(2 * this.waitMs, LONGEST_WAIT_MS);
    };
  }
}
