//go:build svm

package cashier

import (
	"errors"
	"testing"

	"kvasird/settle"
)

// A model that is not known yet is to be asked for again.
func TestQuoteOfUnheardModel(t *testing.T) {
	s := newShop(t, func(c *DeskConfig) {
		c.Models = func(string, settle.Node) (Model, error) {
			return Model{}, &Refusal{Code: CodeNotYet, Text: "soon", Retry: 2}
		}
	})
	var r *Refusal
	if _, err := s.teller().Quote(s.Context(), s.ask()); !errors.As(err, &r) || r.Code != CodeNotYet || r.Retry != 2 {
		t.Errorf("%v", err)
	}
}
