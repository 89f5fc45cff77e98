package settletest

import (
	"encoding/binary"

	"kvasird/settle"
)

// Forward wraps an instruction so that it is run as an inner one: by the program that
// AddForwarder installed. No account may be named twice.
func Forward(forwarder settle.Key, in Instruction) Instruction {
	return Instruction{forwarder, append([]Account{reads(in.Program)}, in.Accounts...), in.Data}
}

// AddForwarder installs a program that calls its first account, as a program, with all
// its other accounts and its data.
func (c *Chain) AddForwarder(name string) settle.Key {
	c.t.Helper()
	address := NewWallet(name).Key
	c.AddProgram(address, forwarder())
	return address
}

// assembler writes sBPF instructions: opcode, registers, offset, immediate.
type assembler struct{ code []byte }

func (a *assembler) op(code, dst, src byte, offset int16, imm int32) {
	a.code = append(a.code, code, src<<4|dst)
	a.code = binary.LittleEndian.AppendUint16(a.code, uint16(offset))
	a.code = binary.LittleEndian.AppendUint32(a.code, uint32(imm))
}

func (a *assembler) set(dst byte, imm int32)                { a.op(0xb7, dst, 0, 0, imm) }
func (a *assembler) copy(dst, src byte)                     { a.op(0xbf, dst, src, 0, 0) }
func (a *assembler) add(dst byte, imm int32)                { a.op(0x07, dst, 0, 0, imm) }
func (a *assembler) load8(dst, src byte, offset int16)      { a.op(0x71, dst, src, offset, 0) }
func (a *assembler) load64(dst, src byte, offset int16)     { a.op(0x79, dst, src, offset, 0) }
func (a *assembler) store8(dst byte, offset int16, s byte)  { a.op(0x73, dst, s, offset, 0) }
func (a *assembler) store64(dst byte, offset int16, s byte) { a.op(0x7b, dst, s, offset, 0) }
func (a *assembler) pointer(dst byte, at int16, s byte, n int32) { // [dst+at] = s + n
	a.copy(2, s)
	a.add(2, n)
	a.store64(dst, at, 2)
}

// Where the program keeps what it hands on, from the start of the heap.
const (
	metasAt = 0x100 // 16 bytes each: key, writable, signer
	infosAt = 0x800 // 56 bytes each
)

// forwarder is the ELF file. The input (r1) is the number of accounts, the accounts, the
// data's length and the data; an account is flags (8 bytes: not a duplicate, signer,
// writable, executable), key, owner, lamports, the data's length, the data, room for
// 10,240 more bytes up to a multiple of 8, and its rent epoch.
func forwarder() []byte {
	var a assembler
	a.copy(6, 1)
	a.set(7, 3)
	a.op(0x67, 7, 0, 0, 32) // r7 = 3 << 32: the heap
	a.load64(8, 6, 0)       // r8: how many accounts
	a.add(6, 8)             // r6: the account
	a.pointer(7, 0, 6, 8)   // the program to call
	a.copy(9, 8)
	a.copy(3, 7)
	a.add(3, metasAt)
	a.copy(4, 7)
	a.add(4, infosAt)
	a.set(5, 0)
	loop := len(a.code) / 8
	a.pointer(4, 0, 6, 8)
	a.op(0x15, 5, 0, 6, 0) // the first account is no argument
	a.store64(3, 0, 2)
	a.load8(1, 6, 2)
	a.store8(3, 8, 1)
	a.load8(1, 6, 1)
	a.store8(3, 9, 1)
	a.add(3, 16)
	a.set(5, 1)
	a.pointer(4, 8, 6, 72) // lamports
	a.load64(1, 6, 80)
	a.store64(4, 16, 1)
	a.pointer(4, 24, 6, 88) // data
	a.pointer(4, 32, 6, 40) // owner
	for i := range int16(3) {
		a.load8(2, 6, 1+i)
		a.store8(4, 48+i, 2)
	}
	a.op(0x0f, 6, 1, 0, 0)
	a.add(6, 88+10240+7)
	a.op(0x57, 6, 0, 0, -8)
	a.load64(2, 6, 0)
	a.store64(4, 40, 2) // rent epoch
	a.add(6, 8)
	a.add(4, 56)
	a.add(9, -1)
	a.op(0x55, 9, 0, int16(loop-len(a.code)/8-1), 0)
	a.pointer(7, 8, 7, metasAt)
	a.pointer(7, 16, 8, -1)
	a.load64(1, 6, 0)
	a.store64(7, 32, 1)
	a.pointer(7, 24, 6, 8)
	a.copy(1, 7)
	a.copy(2, 7)
	a.add(2, infosAt)
	a.copy(3, 8)
	a.copy(4, 7)
	a.set(5, 0)
	invoke := uint32(0xa22b9c85) // Murmur3 of "sol_invoke_signed_c"
	a.op(0x85, 0, 0, 0, int32(invoke))
	a.op(0x95, 0, 0, 0, 0)
	return elf(a.code)
}

// elf wraps code as sBPF version 3 wants it: no sections, one segment of constants (8
// bytes, not used) and one of code.
func elf(code []byte) []byte {
	le := binary.LittleEndian
	const start = 64 + 2*56
	b := append([]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, make([]byte, 9)...)
	b = le.AppendUint16(b, 3)     // a shared object
	b = le.AppendUint16(b, 247)   // BPF
	b = le.AppendUint32(b, 1)     // ELF's version
	b = le.AppendUint64(b, 1<<32) // where it starts
	b = le.AppendUint64(b, 64)    // the segments' table
	b = le.AppendUint64(b, 0)
	b = le.AppendUint32(b, 3) // sBPF's version
	for _, n := range []uint16{64, 56, 2, 64, 1, 0} {
		b = le.AppendUint16(b, n)
	}
	segment := func(flags uint32, offset, address, size uint64) {
		b = le.AppendUint32(b, 1)
		b = le.AppendUint32(b, flags)
		for _, n := range []uint64{offset, address, address, size, size, 8} {
			b = le.AppendUint64(b, n)
		}
	}
	segment(4, start, 0, 8)
	segment(1, start+8, 1<<32, uint64(len(code)))
	return append(append(b, make([]byte, 8)...), code...)
}
