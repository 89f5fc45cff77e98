package settle

// Standing is how a node stands among the holders of a model: what it would lose by what it only
// announces. Its zero value is one that does not count as a holder.
type Standing struct {
	Wallet Wallet // that has its pay: nodes of one wallet are one holder
	Pay    Amount // gross, of BondEpochs epochs
}

// StandingPart is how many times as much one holder may have earned as another one, for both to
// count among whom a draw chose.
const StandingPart = 8

// Standing is that of a node with a bond, in an epoch. Nodes and wallets cost nothing to make,
// and neither does a stake that can be taken out again: so a holder has to have been paid, and to
// have left in its bond what is held of that. Error: ErrPast.
func (p Params) Standing(w Wallet, b Bond, epoch uint64) (Standing, error) {
	b, err := p.AtEpoch(b, epoch)
	if err != nil || w == (Wallet{}) || b.Target() == 0 {
		return Standing{}, err
	}
	held, err := part(b.Target(), p.HeldPPM, PPM, down)
	if err != nil || b.Bonded < held {
		return Standing{}, err
	}
	return Standing{w, b.Target()}, nil
}

// Beside says whether a draw between two holders counts. It chooses each as often, so one that has
// earned next to nothing beside the other was not drawn, and is there to be counted.
func (s Standing) Beside(o Standing) bool {
	return s.Wallet != (Wallet{}) && o.Wallet != (Wallet{}) && s.Pay >= o.Pay/StandingPart && o.Pay >= s.Pay/StandingPart
}
