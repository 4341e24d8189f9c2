// The Secure Enclave helper: holds a node's identity key and signs under sealring's labels.
//
// Frames on standard input and output: a length (4 bytes, big endian) and its bytes. Requests: 1 = public
// key; 2 = sign, then the label's length (1 byte), the label, the content; 3 = derive a secret, then a point.
// Responses: status (0 = done, 1 = failed), then the key as an uncompressed point, a DER signature, a secret of
// 32 bytes, or an error in ASCII. What is signed is
// 64 spaces, the label, a zero byte and SHA-256(content): the helper puts that together itself, so nobody can
// have it sign anything else. The key file holds the enclave's own wrapped key: useless on any other Mac.

import CryptoKit
import Foundation
import Security

let maximumRequest = 64 << 10
let labelPrefix = Array("sealring/v1 ".utf8)
let maximumLabel = 48

struct Failure: Error {
    let message: String
}

func readExactly(_ count: Int) -> [UInt8]? {
    var bytes = [UInt8]()
    while bytes.count < count {
        let wanted = count - bytes.count
        var part = [UInt8](repeating: 0, count: wanted)
        let got = read(STDIN_FILENO, &part, wanted)
        if got == 0 { return nil }
        if got < 0 {
            if errno == EINTR { continue }
            return nil
        }
        bytes += part[0..<got]
    }
    return bytes
}

func writeAll(_ bytes: [UInt8]) -> Bool {
    var sent = 0
    while sent < bytes.count {
        let done = bytes[sent...].withUnsafeBytes { write(STDOUT_FILENO, $0.baseAddress, $0.count) }
        if done < 0 {
            if errno == EINTR { continue }
            return false
        }
        sent += done
    }
    return true
}

func frame(_ body: [UInt8]) -> [UInt8] {
    let length = UInt32(body.count)
    return [24, 16, 8, 0].map { UInt8((length >> UInt32($0)) & 0xff) } + body
}

// CryptoKit's default is a key of the unlocked user session. A daemon signs before anybody has logged in: from the
// first unlocking of the disk on.
func access() throws -> SecAccessControl {
    var problem: Unmanaged<CFError>?
    guard
        let access = SecAccessControlCreateWithFlags(
            kCFAllocatorDefault, kSecAttrAccessibleAfterFirstUnlockThisDeviceOnly, .privateKeyUsage, &problem)
    else {
        let why = problem.map { "\($0.takeRetainedValue())" } ?? "unknown"
        throw Failure(message: "no access control: \(why)")
    }
    return access
}

// So that a key that cannot sign here and now refuses the join, and not the third challenge after it.
func trySigning(_ key: SecureEnclave.P256.Signing.PrivateKey) throws {
    _ = try key.signature(for: Data("sealring trial".utf8))
}

func loadOrCreate(_ path: String) throws -> SecureEnclave.P256.Signing.PrivateKey {
    guard SecureEnclave.isAvailable else { throw Failure(message: "no secure enclave") }
    if let kept = FileManager.default.contents(atPath: path) {
        let key = try SecureEnclave.P256.Signing.PrivateKey(dataRepresentation: kept)
        try trySigning(key)
        return key
    }
    let key = try SecureEnclave.P256.Signing.PrivateKey(accessControl: access())
    try trySigning(key)
    try keep(key.dataRepresentation, at: path)
    return key
}

func keep(_ representation: Data, at path: String) throws {
    let file = open(path, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW, 0o600)
    guard file >= 0 else { throw Failure(message: "cannot make the key file") }
    defer { close(file) }
    let data = [UInt8](representation)
    guard write(file, data, data.count) == data.count, fsync(file) == 0 else {
        unlink(path)
        throw Failure(message: "cannot write the key file")
    }
}

// Another key of the enclave than the identity, for one key must not both sign and agree. It is made when the first
// secret is asked for. The secret depends on the point that comes with the request: without that it is gone.
func derive(_ point: ArraySlice<UInt8>) throws -> [UInt8] {
    let path = arguments[2] + ".secrets"
    let own: SecureEnclave.P256.KeyAgreement.PrivateKey
    if let kept = FileManager.default.contents(atPath: path) {
        own = try SecureEnclave.P256.KeyAgreement.PrivateKey(dataRepresentation: kept)
    } else {
        own = try SecureEnclave.P256.KeyAgreement.PrivateKey(accessControl: access())
        try keep(own.dataRepresentation, at: path)
    }
    let seed = try P256.KeyAgreement.PublicKey(x963Representation: Data(point))
    let secret = try own.sharedSecretFromKeyAgreement(with: seed).hkdfDerivedSymmetricKey(
        using: SHA256.self, salt: Data(point), sharedInfo: Data("sealring/v1 derived secret".utf8), outputByteCount: 32)
    return secret.withUnsafeBytes { [UInt8]($0) }
}

func sign(_ request: ArraySlice<UInt8>, with key: SecureEnclave.P256.Signing.PrivateKey) throws -> [UInt8] {
    guard let first = request.first, Int(first) <= maximumLabel, request.count > Int(first) else {
        throw Failure(message: "malformed request")
    }
    let length = Int(first)
    let label = Array(request.dropFirst().prefix(length))
    guard label.starts(with: labelPrefix), label.allSatisfy({ $0 >= 0x20 && $0 < 0x7f }) else {
        throw Failure(message: "unknown label")
    }
    let content = Data(request.dropFirst(1 + length))
    let input = [UInt8](repeating: 0x20, count: 64) + label + [0] + Array(SHA256.hash(data: content))
    return [UInt8](try key.signature(for: Data(input)).derRepresentation)
}

func answer(_ request: [UInt8], with key: SecureEnclave.P256.Signing.PrivateKey) -> [UInt8] {
    do {
        switch request.first {
        case .some(1) where request.count == 1:
            return [0] + [UInt8](key.publicKey.x963Representation)
        case .some(2):
            return [0] + (try sign(request.dropFirst(), with: key))
        case .some(3):
            return [0] + (try derive(request.dropFirst()))
        default:
            throw Failure(message: "unknown operation")
        }
    } catch let failure as Failure {
        return [1] + Array(failure.message.utf8)
    } catch {
        return [1] + Array("the enclave refused".utf8)
    }
}

let arguments = CommandLine.arguments
guard arguments.count == 3, arguments[1] == "--key" else {
    FileHandle.standardError.write(Data("usage: sealring-enclave --key FILE\n".utf8))
    exit(2)
}
let key: SecureEnclave.P256.Signing.PrivateKey
do {
    key = try loadOrCreate(arguments[2])
} catch {
    let why = (error as? Failure)?.message ?? "\(error)"
    FileHandle.standardError.write(Data("no key: \(why)\n".utf8))
    exit(1)
}
while let header = readExactly(4) {
    let length = header.reduce(0) { $0 << 8 | Int($1) }
    guard length >= 1, length <= maximumRequest, let request = readExactly(length) else { exit(1) }
    guard writeAll(frame(answer(request, with: key))) else { exit(1) }
}
