// The search runs in a worker. For pages that are opened from the disk, browsers refuse to start one, so an
// invisible frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data: structuredClone(data) }));
      this.loaded = new Promise((resolve) => {
        const script = inside.document.createElement("script");
        script.onload = resolve;
        script.onerror = (error) => this.onerror?.(error);
        script.src = new URL(url, location.href).href;
        inside.document.head.append(script);
      });
      this.inside = inside;
    }
    postMessage(message) {
      const data = structuredClone(message); // as a worker would: the sender changes its objects afterwards
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
