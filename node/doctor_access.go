package node

import (
	"path/filepath"
	"time"
)

// checkAccess says who can use the HTTP API.
func (d *doctor) checkAccess() {
	if !d.cfg.hasHTTP() {
		return
	}
	keys, err := openKeys(filepath.Join(d.cfg.Data, keysName), time.Now)
	switch {
	case err != nil:
		d.add(Finding{Name: "http", Severity: SeverityFail, Text: "the keys of the HTTP API cannot be read", Why: err.Error(),
			Fix: "mend the file, or remove it and make new keys with kvasir keys add", Cost: "kvasird does not start"})
	case d.cfg.exposed() && keys.count() == 0:
		d.add(Finding{Name: "http", Severity: SeverityWarn, Text: d.cfg.HTTP + " would let other machines in, and there is no key",
			Why: "without keys nobody could be told from anybody", Fix: "run kvasir keys add NAME, or set http to 127.0.0.1:19000", Cost: "the HTTP API stays closed"})
	case d.cfg.asksForKey() && keys.count() == 0:
		d.add(Finding{Name: "http", Severity: SeverityWarn, Text: "a key is asked for, and there is none",
			Fix: "run kvasir keys add NAME, or remove gateway.require_key", Cost: "the HTTP API refuses all requests"})
	case d.cfg.exposed():
		d.ok("http", "%s is open to other machines, with one of %d keys; what they send is not encrypted", d.cfg.HTTP, keys.count())
	case d.cfg.asksForKey():
		d.ok("http", "%s is open to this machine, with one of %d keys", d.cfg.HTTP, keys.count())
	default:
		d.ok("http", "%s is open to this machine, without a key", d.cfg.HTTP)
	}
}
