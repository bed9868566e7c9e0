// The search of the site runs in a worker, which browsers refuse to pages of the file system.
// There this class takes the worker's place: the script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      this.inner = this.frame.contentWindow
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inner.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve())
      this.ready = this.load(new URL(url, location.href).href)
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.inner.document.createElement("script")
        script.src = url
        script.onload = done
        script.onerror = failed
        this.inner.document.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
