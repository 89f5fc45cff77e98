package cashier

import (
	"encoding/binary"
	"errors"
	"slices"

	"kvasird/node/kv"
	"kvasird/settle"
)

// PriceRecords are the signed records of a model's price after an epoch, oldest first, so many
// at most: the books have all that were ever made.
func (b *Books) PriceRecords(model settle.Hash, after uint64, most int) (list [][]byte, err error) {
	err = b.store.View(func(tx *kv.Tx) error {
		return tx.Each(modelKey('v', model, 0)[:33], func(k, v []byte) error {
			if len(list) >= most {
				return errEnough
			}
			if binary.BigEndian.Uint64(k[33:]) > after {
				list = append(list, slices.Clone(v))
			}
			return nil
		})
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return list, err
}
