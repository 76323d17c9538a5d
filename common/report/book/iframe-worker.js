// A page that was opened as a file may start no worker. There the search runs in a hidden frame, which has the same two
// functions for messages.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      const inner = frame.contentWindow;
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      this.postMessage = data => loaded.then(() => inner.dispatchEvent(new inner.MessageEvent("message", {data})));
      const script = inner.document.body.appendChild(inner.document.createElement("script"));
      const loaded = new Promise(done => script.onload = done);
      script.src = url;
    }
  };
