// Browsers start no worker for a page that is opened as a file, and the search of the
// theme runs in one. There, run the worker's script in a hidden frame. The name of the
// class is the one by which the search recognises such a frame.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const script = document.createElement("script");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }));
          script.addEventListener("load", () => resolve(inner));
          script.src = url;
          inner.document.body.append(script);
        }, { once: true });
      });
      frame.srcdoc = "<!doctype html><title>search</title>";
      document.body.append(frame);
    }

    async postMessage(data) {
      const inner = await this.ready;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
