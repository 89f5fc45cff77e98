package solana

import (
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"testing"

	"kvasird/settle"
	"kvasird/settle/settletest"
)

// budget is an instruction of the compute budget.
func budget(kind byte, value uint64, size int) settletest.Instruction {
	return settletest.Instruction{Program: budgetProgram, Data: append([]byte{kind}, binary.LittleEndian.AppendUint64(nil, value)[:size]...)}
}

// FuzzPartial: no bytes of a client make the fee key sign what it should not.
func FuzzPartial(f *testing.F) {
	fee, alice := settletest.NewWallet("fee"), settletest.NewWallet("alice")
	mint := settletest.NewWallet("mint").Key
	cl, err := New(Config{Providers: []string{"http://127.0.0.1:1"}, Decimals: 6,
		Vault: Vault{Owner: settletest.NewWallet("operator").Key, Mint: mint, Program: settletest.Token}})
	if err != nil {
		f.Fatal(err)
	}
	m := settletest.Mint{Key: mint, Program: settletest.Token, Decimals: 6}
	for _, version := range []int{settletest.Legacy, settletest.V0, settletest.V1} {
		f.Add(settletest.Sign(settletest.Tx{Version: version, Signers: []settletest.Wallet{fee, alice}, Blockhash: settle.Key{1}, Instructions: []settletest.Instruction{
			budget(2, 20_000, 4), m.TransferChecked(m.ATA(alice.Key), cl.vault.Account, alice.Key, 100_000), settletest.Memo("m")}}))
	}
	public := fee.Private.Public().(ed25519.PublicKey)
	f.Fuzz(func(t *testing.T, b []byte) {
		tx, payer, err := cl.readPartial([32]byte(public), b)
		if err == nil {
			err = cl.checkDue(tx, payer, Due{100_000, "m"})
		}
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Error(err)
			}
			return
		}
		if len(tx.Signatures) != 2 || payer == settle.Key(public) {
			t.Errorf("taken: %x", b)
		}
	})
}
