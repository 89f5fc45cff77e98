// The wire format of transactions: legacy, version 0 and version 1 (SIMD-0385).
//
//   legacy, 0:  count, signatures (64 bytes each), message
//   1:          message, signatures (as many as its header says)
//   message:    [0x80 | version], header (3 bytes), keys, blockhash, instructions,
//               and for version 0 the lookups
// Counts are compact-u16: 7 bits a byte, the low ones first.

const digits = '123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz'

export function toBase58 (bytes) {
  let n = BigInt('0x0' + Buffer.from(bytes).toString('hex'))
  let text = ''
  for (; n > 0n; n /= 58n) text = digits[Number(n % 58n)] + text
  for (const b of bytes) {
    if (b !== 0) break
    text = '1' + text
  }
  return text
}

// fromBase58 gives the bytes, or throws when the text is not base58 of so many.
export function fromBase58 (text, length) {
  let n = 0n
  for (const c of String(text)) {
    const d = digits.indexOf(c)
    if (d < 0) throw new Error(`not base58: ${text}`)
    n = n * 58n + BigInt(d)
  }
  let hex = n === 0n ? '' : n.toString(16)
  if (hex.length % 2) hex = '0' + hex
  const zeros = /^1*/.exec(text)[0].length
  const bytes = Buffer.concat([Buffer.alloc(zeros), Buffer.from(hex, 'hex')])
  if (length !== undefined && bytes.length !== length) throw new Error(`${bytes.length} bytes in base58, not ${length}`)
  return bytes
}

class Reader {
  constructor (bytes) {
    this.bytes = bytes
    this.at = 0
  }

  take (n) {
    if (this.at + n > this.bytes.length) throw new Error('the transaction is cut off')
    this.at += n
    return this.bytes.subarray(this.at - n, this.at)
  }

  u8 () { return this.take(1)[0] }

  compact () {
    let n = 0
    for (let shift = 0; shift < 21; shift += 7) {
      const b = this.u8()
      n |= (b & 0x7f) << shift
      if (b < 0x80) return n
    }
    throw new Error('a count of more than three bytes')
  }

  many (n, one) { return Array.from({ length: n }, () => one()) }
}

// parse reads a transaction: {version: 'legacy' | 0 | 1, signatures, header, keys,
// blockhash, instructions: [{program, accounts, data}], lookups: [{table, writable,
// readonly}]}. Program and accounts are indices, keys and signatures are bytes.
export function parse (bytes) {
  const r = new Reader(bytes)
  const tx = bytes[0] === 0x81 ? version1(r) : version0(r)
  if (r.at !== bytes.length) throw new Error(`${bytes.length - r.at} bytes after the transaction`)
  return tx
}

function readHeader (r) {
  return { signers: r.u8(), readonlySigners: r.u8(), readonlyOthers: r.u8() }
}

function version0 (r) {
  const signatures = r.many(r.compact(), () => r.take(64))
  let version = 'legacy'
  if (r.bytes[r.at] & 0x80) {
    version = r.u8() & 0x7f
    if (version !== 0) throw new Error(`version ${version} has another envelope`)
  }
  const header = readHeader(r)
  const keys = r.many(r.compact(), () => r.take(32))
  const blockhash = r.take(32)
  const instructions = r.many(r.compact(), () => (
    { program: r.u8(), accounts: [...r.take(r.compact())], data: r.take(r.compact()) }))
  const lookups = version === 'legacy'
    ? []
    : r.many(r.compact(), () => ({ table: r.take(32), writable: [...r.take(r.compact())], readonly: [...r.take(r.compact())] }))
  return { version, signatures, header, keys, blockhash, instructions, lookups }
}

function version1 (r) {
  r.u8()
  const header = readHeader(r)
  const mask = r.take(4).readUInt32LE()
  const blockhash = r.take(32)
  const [count, keyCount] = [r.u8(), r.u8()]
  const keys = r.many(keyCount, () => r.take(32))
  // The values of the compute budget: a fee of 8 bytes (2 bits), the others 4 each.
  r.take((mask & 3 ? 8 : 0) + 4 * [4, 8, 16].filter((bit) => mask & bit).length)
  const heads = r.many(count, () => ({ program: r.u8(), accounts: r.u8(), length: r.take(2).readUInt16LE() }))
  const instructions = heads.map((h) => ({ program: h.program, accounts: [...r.take(h.accounts)], data: r.take(h.length) }))
  const signatures = r.many(header.signers, () => r.take(64))
  return { version: 1, signatures, header, keys, blockhash, instructions, lookups: [] }
}
