package pay

import (
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"time"

	"kvasird/node/cashier"
	"kvasird/node/gateway"
	"kvasird/settle"
)

// Limits of what an address leaves unpaid, since the settlement counts that of this whole node:
// its places must not be a few addresses' to fill.
const (
	maxUnpaid = 32                                 // quotes that nobody paid; the settlement has 256 of a node
	maxNamed  = 16                                 // and those whose payment was named, and not proved; the settlement has 1024
	unpaidFor = 2 * time.Minute                    // that a quote is open
	namedFor  = cashier.NamedSeconds * time.Second // that a named payment may be looked for
	// maxQuotes bounds what is remembered. It is more than the settlement lets a node have.
	maxQuotes = 1 << 11
)

// unpaid is a quote that counts for the address which asked for it, whoever names a payment.
type unpaid struct {
	address string
	named   bool
	until   time.Time
}

// address is who asks, as far as the network knows. A host has all of its /64.
func (c *call) address() string {
	host, _, err := net.SplitHostPort(c.r.RemoteAddr)
	if err != nil {
		host = c.r.RemoteAddr
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	if a = a.Unmap(); a.Is6() {
		return netip.PrefixFrom(a.WithZone(""), 64).Masked().String()
	}
	return a.String()
}

// mayAsk refuses quotes to an address that leaves too many unpaid.
func (c *call) mayAsk() error {
	d, address := c.d, c.address()
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.cfg.Now()
	maps.DeleteFunc(d.unpaid, func(_ settle.QuoteID, u unpaid) bool { return !now.Before(u.until) })
	quotes, named, first := 0, 0, time.Time{}
	for _, u := range d.unpaid {
		if u.address != address {
			continue
		}
		if quotes++; u.named {
			named++
		}
		if first.IsZero() || u.until.Before(first) {
			first = u.until
		}
	}
	message := ""
	switch {
	case named >= maxNamed:
		message = fmt.Sprintf("%d payments were named that the chain does not have, which is the most", named)
	case quotes >= maxUnpaid:
		message = fmt.Sprintf("%d quotes were asked for and not paid within %v, which is the most", quotes, unpaidFor)
	default:
		return nil
	}
	return &gateway.PaymentError{Status: http.StatusTooManyRequests, Code: "too_many_quotes", RetryAfter: max(first.Sub(now), time.Second), Message: message}
}

// unsettled counts a quote that nobody has paid.
func (d *Door) unsettled(address string, q settle.Quote) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.unpaid) < maxQuotes { // else the settlement's own bound is left
		d.unpaid[q.ID] = unpaid{address: address, until: d.cfg.Now().Add(unpaidFor)}
	}
}

// named counts a quote whose payment is not proved yet.
func (d *Door) named(address string, id settle.QuoteID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	u, known := d.unpaid[id]
	if !known {
		u.address = address
	}
	if u.named || !known && len(d.unpaid) >= maxQuotes {
		return
	}
	d.unpaid[id] = unpaid{u.address, true, d.cfg.Now().Add(namedFor)}
}

// unnamed counts a quote as one whose payment was none: it may be paid by another.
func (d *Door) unnamed(id settle.QuoteID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u, ok := d.unpaid[id]; ok && u.named {
		d.unpaid[id] = unpaid{address: u.address, until: d.cfg.Now().Add(unpaidFor)}
	}
}

// settled counts a quote no longer.
func (d *Door) settled(id settle.QuoteID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.unpaid, id)
}
